//! The worker pool: one entry a step, barriers in between.
//!
//! The calling thread is worker 0; the others are threads of the pool. [`Pool::run`] sends all of them through one
//! closure, which cuts its work into regions: [`Worker::for_each`] shares a region's items out through an atomic counter
//! and ends with a barrier. A general task pool costs 6 to 50 microseconds for each region, a barrier less than one, and
//! a decode step has a few hundred regions.
//!
//! Which worker takes which items depends on timing; no result may.

#[cfg(test)]
mod tests;

use std::{
    any::Any,
    cell::UnsafeCell,
    hint,
    ops::Range,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle, ThreadId},
    time::{Duration, Instant},
};

use octavo_backend::BackendError;

use crate::affinity::{self, CpuSet, ThreadMask};

/// Turns of the spin loop before a waiter lets others run: 20 to 50 microseconds on current processors.
const SPINS: u32 = 1000;

/// A pool that has waited this long for the next step sleeps until it comes.
const AWAKE: Duration = Duration::from_millis(2);

/// Threads that go through a step together. Dropping it ends them.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    binding: Option<Binding>,
    /// Where all workers stay, if these are not all CPUs of the process.
    part: Option<CpuSet>,
}

impl Pool {
    /// Starts `count - 1` threads (at least none) on the CPUs that the process may use.
    ///
    /// # Errors
    /// A thread that the system refuses to start.
    pub fn new(count: usize) -> Result<Pool, BackendError> {
        Pool::within(count, &affinity::of_process())
    }

    /// Starts `count - 1` threads (at least none) on some of the CPUs that the process may use.
    ///
    /// Workers are pinned, one to each CPU, only when there are as many as CPUs: several smaller pools would otherwise stack
    /// on the first ones.
    ///
    /// # Errors
    /// A thread that the system refuses to start.
    pub(crate) fn within(count: usize, allowed: &CpuSet) -> Result<Pool, BackendError> {
        let count = count.max(1);
        let cpus: Vec<usize> = allowed.cpus();
        let pins = cpus.len() == count && count > 1;
        let part = (cpus.len() < affinity::of_process().cpus().len()).then(|| allowed.clone());
        let place = |index: usize| cpus.get(index).filter(|_| pins).map(|&cpu| CpuSet::of_cpus(&[cpu]));
        let mut pool = Pool {
            shared: Arc::new(Shared::new(count, if count > cpus.len() { 0 } else { SPINS })),
            threads: Vec::with_capacity(count - 1),
            binding: place(0).or_else(|| part.clone()).map(|set| Binding { set, bound: None }),
            part: part.clone(),
        };
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            // A thread inherits the mask of its creator, which may be pinned already.
            let mask = place(index).unwrap_or_else(|| allowed.clone());
            let thread = thread::Builder::new()
                .name(format!("octavo-cpu-{index}"))
                .spawn(move || {
                    mask.apply();
                    serve(&shared, index);
                })
                .map_err(|error| BackendError::Kernel(format!("worker thread {index} did not start: {error}")))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Number of workers, the caller included.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Runs `body` where the workers are, so that memory it touches, and threads it starts, are there too.
    pub fn beside<T>(&self, body: impl FnOnce() -> T) -> T {
        let Some(part) = &self.part else { return body() };
        let mut binding = Binding { set: part.clone(), bound: None };
        binding.bind_caller();
        body()
    }

    /// Sends every worker through `body` and waits for all of them.
    ///
    /// # Errors
    /// [`BackendError::Kernel`] if a worker panicked; the others leave at their next barrier and the pool stays usable.
    pub fn run<F: Fn(&Worker<'_>) + Sync>(&mut self, body: F) -> Result<(), BackendError> {
        if let Some(binding) = &mut self.binding {
            binding.bind_caller();
        }
        let shared = &*self.shared;
        shared.begin(&body, &self.threads);
        shared.enter(&Job::of(&body), 0);
        let mut wait = Wait::new(shared.spins);
        while shared.running.0.load(Ordering::Acquire) != 0 {
            wait.turn();
        }
        match shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(message) => Err(BackendError::Kernel(message)),
            None => Ok(()),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.step.0.fetch_add(1, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A worker catches its panics, so that there is nothing to learn from the result.
            let _ = thread.join();
        }
    }
}

/// One worker's place in a step.
pub struct Worker<'a> {
    shared: &'a Shared,
    /// 0 for the calling thread.
    pub index: usize,
    /// Workers in this step.
    pub count: usize,
}

impl Worker<'_> {
    /// Waits until every worker is here. What any of them wrote before is visible to all of them after.
    ///
    /// Leaves the step (by unwinding) when another worker has panicked.
    pub fn barrier(&self) {
        if self.count > 1 {
            self.shared.wait_for_all(0);
        }
    }

    /// One region: hands `0..items` out in ranges of at most `chunk` and ends with a barrier.
    ///
    /// All workers must call it with the same numbers. No range is handed out twice.
    pub fn for_each(&self, items: usize, chunk: usize, mut body: impl FnMut(Range<usize>)) {
        let chunk = chunk.max(1);
        loop {
            let start = self.shared.taken[0].0.fetch_add(chunk, Ordering::Relaxed);
            if start >= items {
                break;
            }
            body(start..items.min(start + chunk));
        }
        self.end_region(1);
    }

    /// As [`Worker::for_each`] for cheap items that lie side by side: each worker has its part of them, goes through it in
    /// order, so that what is fetched ahead is its own, and then helps the others with theirs. It takes half of what is left
    /// of a part at a time and ends with single items, so that there are few ranges and a late worker still costs little.
    pub fn for_each_in_order(&self, items: usize, mut body: impl FnMut(Range<usize>)) {
        for owner in (self.index..self.count).chain(0..self.index) {
            let (first, end) = (items * owner / self.count, items * (owner + 1) / self.count);
            let share = |taken: usize| ((end - first - taken) / 2).max(1);
            let next = |taken: usize| (taken < end - first).then(|| taken + share(taken));
            let taken = &self.shared.taken[owner].0;
            while let Ok(start) = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
                body(first + start..first + start + share(start));
            }
        }
        self.end_region(self.count);
    }

    /// Ends a region that has used so many of the counters.
    fn end_region(&self, counters: usize) {
        if self.count > 1 {
            self.shared.wait_for_all(counters);
        } else {
            self.shared.forget_items(counters);
        }
    }
}

/// Goes through items once with up to `threads` threads that end with them: at load, when there is no pool yet. Threads that
/// the system refuses are done without.
pub fn for_each_once<T: Send>(items: Vec<T>, threads: usize, body: impl Fn(T) + Sync) {
    let threads = threads.min(items.len());
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(item) = next() {
            body(item);
        }
    };
    thread::scope(|scope| {
        for index in 1..threads {
            let thread = thread::Builder::new().name(format!("octavo-load-{index}"));
            if thread.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
}

/// Keeps what different workers write off each other's cache lines (pairs of lines are fetched together).
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    count: usize,
    /// Turns of the spin loop before a waiter lets others run: none where there are more workers than CPUs.
    spins: u32,
    /// Counts steps; a change is the signal to start.
    step: Line<AtomicU32>,
    /// Threads still inside the step, the caller not counted.
    running: Line<AtomicUsize>,
    /// Workers that have reached the barrier.
    arrived: Line<AtomicUsize>,
    /// Counts completed barriers.
    epoch: Line<AtomicU32>,
    /// Items of this region that have been handed out, of each worker's part where workers have one. Invariant: 0 when a
    /// region begins; the last to arrive at a barrier sets them back while all others wait there.
    taken: Vec<Line<AtomicUsize>>,
    /// A worker has panicked in this step.
    poisoned: AtomicBool,
    stop: AtomicBool,
    /// Which workers sleep; the caller wakes them.
    asleep: Vec<Line<AtomicBool>>,
    job: UnsafeCell<Job>,
    /// What the first panic of this step said.
    failure: Mutex<Option<String>>,
}

// SAFETY: `job` is written only by the caller of `run`, while no thread is inside a step (`running` is 0), and read by
// threads only after they have seen the change of `step` that follows the write. Everything else is atomic or locked.
unsafe impl Sync for Shared {}
// SAFETY: the pointer inside `job` is used only during `run`, whose closure is `Sync`.
unsafe impl Send for Shared {}

/// A closure without its type.
#[derive(Clone, Copy)]
struct Job {
    body: *const (),
    call: unsafe fn(*const (), &Worker<'_>),
}

impl Job {
    fn of<F: Fn(&Worker<'_>) + Sync>(body: &F) -> Job {
        /// # Safety
        /// `body` points to a live `F`.
        unsafe fn call<F: Fn(&Worker<'_>)>(body: *const (), worker: &Worker<'_>) {
            // SAFETY: by the contract of this function.
            unsafe { (*body.cast::<F>())(worker) }
        }
        Job { body: (body as *const F).cast(), call: call::<F> }
    }
}

/// How workers leave a poisoned step; never shown to anyone.
struct Left;

impl Shared {
    fn new(count: usize, spins: u32) -> Shared {
        Shared {
            count,
            spins,
            step: Line(AtomicU32::new(0)),
            running: Line(AtomicUsize::new(0)),
            arrived: Line(AtomicUsize::new(0)),
            epoch: Line(AtomicU32::new(0)),
            taken: (0..count).map(|_| Line(AtomicUsize::new(0))).collect(),
            poisoned: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (0..count).map(|_| Line(AtomicBool::new(false))).collect(),
            job: UnsafeCell::new(Job::of(&|_: &Worker<'_>| {})),
            failure: Mutex::new(None),
        }
    }

    /// Publishes a step and wakes who sleeps. No thread is inside a step.
    fn begin<F: Fn(&Worker<'_>) + Sync>(&self, body: &F, threads: &[JoinHandle<()>]) {
        // SAFETY: no thread reads `job` before `step` changes (see the `Sync` impl).
        unsafe { *self.job.get() = Job::of(body) };
        self.arrived.0.store(0, Ordering::Relaxed);
        self.forget_items(self.count);
        self.poisoned.store(false, Ordering::Relaxed);
        self.running.0.store(threads.len(), Ordering::Relaxed);
        // Sequentially consistent with `asleep`: either the thread sees the new step or we see it sleep.
        self.step.0.fetch_add(1, Ordering::SeqCst);
        for (thread, asleep) in threads.iter().zip(&self.asleep[1..]) {
            if asleep.0.load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
    }

    /// Runs one worker's share and keeps a panic inside.
    fn enter(&self, job: &Job, index: usize) {
        let worker = Worker { shared: self, index, count: self.count };
        // SAFETY: `run` keeps the closure alive until `running` is 0, and it is `Sync`.
        let result = panic::catch_unwind(AssertUnwindSafe(|| unsafe { (job.call)(job.body, &worker) }));
        if let Err(payload) = result
            && !payload.is::<Left>()
        {
            let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert_with(|| format!("worker {index}: {}", message(&*payload)));
            drop(failure);
            self.poisoned.store(true, Ordering::Release);
        }
    }

    fn forget_items(&self, counters: usize) {
        self.taken[..counters].iter().for_each(|taken| taken.0.store(0, Ordering::Relaxed));
    }

    /// The last to arrive sets back the counters of items that the region has used.
    fn wait_for_all(&self, counters: usize) {
        let epoch = self.epoch.0.load(Ordering::Relaxed);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) == self.count - 1 {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.forget_items(counters);
            self.epoch.0.store(epoch.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut wait = Wait::new(self.spins);
        while self.epoch.0.load(Ordering::Acquire) == epoch {
            if self.poisoned.load(Ordering::Acquire) {
                // Not `panic!`: the hook would print a second message about a fault that is already reported.
                panic::resume_unwind(Box::new(Left));
            }
            wait.turn();
        }
    }

    /// Waits for the step after `seen`; sleeps when it does not come soon.
    fn next_step(&self, seen: u32, index: usize) -> u32 {
        let mut wait = Wait::new(self.spins);
        loop {
            let step = self.step.0.load(Ordering::Acquire);
            if step != seen {
                return step;
            }
            if wait.turn() < AWAKE {
                continue;
            }
            let asleep = &self.asleep[index].0;
            asleep.store(true, Ordering::SeqCst);
            while self.step.0.load(Ordering::SeqCst) == seen {
                thread::park();
            }
            asleep.store(false, Ordering::SeqCst);
        }
    }
}

/// A thread's life: one step after another until the pool is dropped.
fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        seen = shared.next_step(seen, index);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: `step` has changed, so that the caller has written `job` and leaves it alone until `running` is 0.
        let job = unsafe { *shared.job.get() };
        shared.enter(&job, index);
        shared.running.0.fetch_sub(1, Ordering::Release);
    }
}

/// What a panic said.
fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".to_owned()
    }
}

/// Patience: spins first, then lets other threads run.
struct Wait {
    /// Turns of the spin loop that are left.
    spins: u32,
    yielding: Option<Instant>,
}

impl Wait {
    fn new(spins: u32) -> Wait {
        Wait { spins, yielding: None }
    }

    /// Waits a moment; returns for how long other threads have been let run.
    fn turn(&mut self) -> Duration {
        if self.spins > 0 {
            self.spins -= 1;
            hint::spin_loop();
            return Duration::ZERO;
        }
        // A spinning waiter may hold the very CPU that the awaited thread needs.
        thread::yield_now();
        self.yielding.get_or_insert_with(Instant::now).elapsed()
    }
}

/// The caller's CPUs: set at its first step, those of before given back when this is dropped.
struct Binding {
    set: CpuSet,
    bound: Option<(ThreadId, ThreadMask)>,
}

impl Binding {
    fn bind_caller(&mut self) {
        let caller = thread::current().id();
        if self.bound.as_ref().is_some_and(|(thread, _)| *thread == caller) {
            return;
        }
        self.release();
        let before = ThreadMask::of_caller();
        self.set.apply();
        self.bound = Some((caller, before));
    }

    fn release(&mut self) {
        if let Some((_, before)) = self.bound.take() {
            before.restore();
        }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        self.release();
    }
}
