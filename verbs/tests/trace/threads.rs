//! Executions on many threads, and memory that other threads free.

use std::sync::mpsc::sync_channel;
use std::thread;

use super::{execute, is_placed, site, trace};

#[test]
fn any_thread_may_free_the_memory() {
    let trace = trace();
    let kernel = || vec![6_u8; 20_000];
    trace.crossed(&execute(&trace, 0, kernel));
    for _ in 0..10 {
        let placed = execute(&trace, 0, kernel);
        assert!(is_placed(&placed));
        assert!(trace.report().pool.leased_send > 0);
        thread::spawn(move || drop(placed)).join().unwrap();
        assert_eq!(trace.report().pool.leased_send, 0);
    }
}

#[test]
fn threads_execute_nodes_and_free_the_memory_of_one_another() {
    const THREADS: u32 = 6;
    const STEPS: u32 = 300;
    let trace = trace();
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| sync_channel::<(Vec<u8>, u8)>(4)).unzip();
    thread::scope(|scope| {
        for (index, receiver) in (0..).zip(receivers) {
            let (trace, next) = (trace.clone(), senders[(index as usize + 1) % THREADS as usize].clone());
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(u64::from(index));
                for step in 0..STEPS {
                    let (value, size) = ((step + index) as u8, random.usize(1..60_000));
                    let (scratch, sent) = execute(&trace, index, || {
                        let scratch = vec![0xaa_u8; random.usize(1..2000)];
                        let mut sent = vec![value; size / 2 + 1];
                        sent.resize(size + 1, value);
                        (scratch, sent)
                    });
                    let crossed = trace.crossed(&sent);
                    assert_eq!((crossed.site, crossed.registered), (site(index, 1), step > 0));
                    next.send((sent, value)).unwrap();
                    let (arrived, value) = receiver.recv().unwrap();
                    assert!(arrived.iter().all(|&byte| byte == value));
                    assert!(scratch.iter().all(|&byte| byte == 0xaa));
                }
            });
        }
        // Only the threads have senders, so a thread that fails ends the others.
        drop(senders);
    });
    let report = trace.report();
    assert_eq!((report.pool.leased_send, report.refused, report.sites.len()), (0, 0, THREADS as usize));
    for sent in &report.sites {
        // Each vector grows once: in its extent if that has room, else into memory of its own.
        let placed = u64::from(STEPS - 1)..=2 * u64::from(STEPS - 1);
        assert!(sent.sent == u64::from(STEPS) && placed.contains(&sent.registered), "{sent:?}");
    }
}
