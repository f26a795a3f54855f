//! Workers enter, wait, fail and sleep together.

use super::*;

#[test]
fn every_worker_enters_once_a_step() {
    for count in 1..=5 {
        let mut pool = Pool::new(count).unwrap();
        let entered: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..3 {
            pool.run(|worker| {
                assert_eq!(worker.count, count);
                entered[worker.index].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        }
        assert!(entered.iter().all(|n| n.load(Ordering::Relaxed) == 3));
    }
}

#[test]
fn regions_hand_out_every_item_once_and_end_together() {
    let mut pool = Pool::new(3).unwrap();
    let taken: Vec<AtomicUsize> = (0..101).map(|_| AtomicUsize::new(0)).collect();
    pool.run(|worker| {
        for round in 0..200 {
            worker.for_each(taken.len(), 1 + round % 7, |items| {
                for item in items {
                    taken[item].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(taken.iter().all(|n| n.load(Ordering::Relaxed) == round + 1), "a barrier was passed early");
            worker.barrier();
        }
    })
    .unwrap();
}

#[test]
fn parts_in_order_cover_every_item_once() {
    for count in [1, 3] {
        let mut pool = Pool::new(count).unwrap();
        let taken: Vec<AtomicUsize> = (0..101).map(|_| AtomicUsize::new(0)).collect();
        pool.run(|worker| {
            for _ in 0..100 {
                worker.for_each_in_order(taken.len(), |items| {
                    for item in items {
                        taken[item].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        })
        .unwrap();
        assert!(taken.iter().all(|n| n.load(Ordering::Relaxed) == 100));
    }
}

#[test]
fn a_region_without_items_is_a_barrier() {
    let mut pool = Pool::new(2).unwrap();
    pool.run(|worker| {
        worker.for_each(0, 8, |_| panic!("there is nothing to do"));
        worker.for_each_in_order(0, |_| panic!("there is nothing to do"));
    })
    .unwrap();
}

#[test]
fn a_panic_in_any_worker_ends_the_step_with_its_message_and_the_pool_goes_on() {
    let mut pool = Pool::new(3).unwrap();
    for guilty in 0..3 {
        let error = pool
            .run(|worker| {
                worker.barrier();
                if worker.index == guilty {
                    panic::resume_unwind(Box::new(format!("fault {guilty}")));
                }
                worker.barrier();
                worker.barrier();
            })
            .unwrap_err();
        assert_eq!(error.to_string(), format!("a kernel failed: worker {guilty}: fault {guilty}"));
        pool.run(|worker| worker.for_each(9, 1, |_| {})).unwrap();
    }
}

#[test]
fn a_pool_that_has_fallen_asleep_wakes_for_the_next_step() {
    let mut pool = Pool::new(2).unwrap();
    for _ in 0..3 {
        let entered = AtomicUsize::new(0);
        pool.run(|_| {
            entered.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(entered.load(Ordering::Relaxed), 2);
        let shared = &pool.shared;
        while !shared.asleep[1].0.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_dropped_pool_leaves_its_caller_unpinned() {
    thread::spawn(|| {
        let before = ThreadMask::of_caller().cpus();
        let mut pool = Pool::new(affinity::of_process().cpus().len()).unwrap();
        pool.run(|_| {}).unwrap();
        assert_eq!(ThreadMask::of_caller().cpus().len(), 1);
        drop(pool);
        assert_eq!(ThreadMask::of_caller().cpus(), before);
    })
    .join()
    .unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn workers_and_what_runs_beside_them_stay_on_the_cpus_given() {
    thread::spawn(|| {
        let all = affinity::of_process().cpus();
        let last = CpuSet::of_cpus(&all[all.len() - 1..]);
        let mut pool = Pool::within(2, &last).unwrap();
        pool.run(|_| assert_eq!(ThreadMask::of_caller().cpus(), last.cpus())).unwrap();
        drop(pool);
        assert_eq!(ThreadMask::of_caller().cpus(), all);
        let pool = Pool::within(2, &last).unwrap();
        assert_eq!(pool.beside(|| thread::spawn(|| ThreadMask::of_caller().cpus()).join().unwrap()), last.cpus());
        assert_eq!(ThreadMask::of_caller().cpus(), all);
    })
    .join()
    .unwrap();
}

#[test]
fn threads_for_once_take_every_item_once() {
    for threads in [0, 1, 2, 7] {
        let taken: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for_each_once((0..100).collect(), threads, |index: usize| {
            taken[index].fetch_add(1, Ordering::Relaxed);
        });
        assert!(taken.iter().all(|times| times.load(Ordering::Relaxed) == 1), "{threads} threads");
    }
}
