//! Which CPUs threads may run on; elsewhere than on Linux they run where the system puts them.

#[cfg(target_os = "linux")]
pub(crate) use linux::{CpuSet, ThreadMask, of_process};
#[cfg(not(target_os = "linux"))]
pub(crate) use other::{CpuSet, ThreadMask, of_process};

#[cfg(target_os = "linux")]
mod linux {
    use std::mem::{size_of, zeroed};

    /// CPUs that a thread may run on.
    #[derive(Clone)]
    pub(crate) struct CpuSet(libc::cpu_set_t);

    impl CpuSet {
        fn empty() -> CpuSet {
            // SAFETY: a bit mask; all zeros is the empty set.
            CpuSet(unsafe { zeroed() })
        }

        /// The set of some CPUs; numbers that the system has no place for are left out.
        pub(crate) fn of_cpus(cpus: &[usize]) -> CpuSet {
            let mut set = CpuSet::empty();
            for &cpu in cpus.iter().filter(|cpu| **cpu < libc::CPU_SETSIZE as usize) {
                // SAFETY: in range.
                unsafe { libc::CPU_SET(cpu, &mut set.0) };
            }
            set
        }

        /// The set of a process or thread; empty if the system does not say.
        fn of(id: libc::pid_t) -> CpuSet {
            let mut set = CpuSet::empty();
            // SAFETY: the set is valid for writes of its size.
            if unsafe { libc::sched_getaffinity(id, size_of::<libc::cpu_set_t>(), &mut set.0) } != 0 {
                return CpuSet::empty();
            }
            set
        }

        /// Its members, ascending.
        pub(crate) fn cpus(&self) -> Vec<usize> {
            // SAFETY: all indices are in range.
            (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &self.0) }).collect()
        }

        /// Binds the calling thread. A refusal is no fault: the thread only runs where the system puts it.
        pub(crate) fn apply(&self) {
            self.apply_to(0);
        }

        fn apply_to(&self, id: libc::pid_t) {
            // SAFETY: the set is valid for reads of its size.
            unsafe { libc::sched_setaffinity(id, size_of::<libc::cpu_set_t>(), &self.0) };
        }
    }

    /// The CPUs that the process may use: those of its first thread, since the calling thread may be pinned already.
    pub(crate) fn of_process() -> CpuSet {
        // SAFETY: has no preconditions.
        let set = CpuSet::of(unsafe { libc::getpid() });
        if !set.cpus().is_empty() {
            return set;
        }
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        CpuSet::of_cpus(&(0..count).collect::<Vec<usize>>())
    }

    /// A thread and the mask it had.
    pub(crate) struct ThreadMask {
        thread: libc::pid_t,
        set: CpuSet,
    }

    impl ThreadMask {
        pub(crate) fn of_caller() -> ThreadMask {
            // SAFETY: has no preconditions.
            let thread = unsafe { libc::gettid() };
            ThreadMask { thread, set: CpuSet::of(thread) }
        }

        #[cfg(test)]
        pub(crate) fn cpus(&self) -> Vec<usize> {
            self.set.cpus()
        }

        /// Gives the thread its mask back, from any thread of the process.
        pub(crate) fn restore(&self) {
            // SAFETY: signal 0 only asks whether the thread is one of this process; its number may have been reused.
            let ours = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.thread, 0) } == 0;
            if ours && !self.set.cpus().is_empty() {
                self.set.apply_to(self.thread);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    /// CPUs by number; threads are never bound here.
    #[derive(Clone)]
    pub(crate) struct CpuSet;

    impl CpuSet {
        pub(crate) fn of_cpus(_cpus: &[usize]) -> CpuSet {
            CpuSet
        }

        pub(crate) fn cpus(&self) -> Vec<usize> {
            (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
        }

        pub(crate) fn apply(&self) {}
    }

    pub(crate) fn of_process() -> CpuSet {
        CpuSet
    }

    pub(crate) struct ThreadMask;

    impl ThreadMask {
        pub(crate) fn of_caller() -> ThreadMask {
            ThreadMask
        }

        pub(crate) fn restore(&self) {}
    }
}
