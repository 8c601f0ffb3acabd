#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::*;
use tonic_rdma_verbs::soft;

/// A participant that has no completions.
#[derive(Debug)]
struct Silent(QueuePairNumber);

impl Participant for Silent {
    fn queue_pair_number(&self) -> QueuePairNumber {
        self.0
    }

    fn handle_completions(&self, completions: &[WorkCompletion], _: &mut Vec<Waker>) {
        panic!("nothing was posted, but {completions:?} came");
    }

    fn fail_with_device(&self) {}
}

/// Checks the book's figures, which come from the limits of the kernel's drivers.
#[test]
fn the_length_of_a_queue_limits_the_number_of_its_connections() {
    let device = |max_completions, locks_memory| {
        let mut device = DeviceAttributes::new("ibverbs", "a device");
        device.max_completions = max_completions;
        device.locks_memory = locks_memory;
        device
    };
    // `max_cqe` of rdma_rxe, and of an mlx5 card.
    assert_eq!(Queue::size_on(&device(32_767, true)), (32_767, 127));
    assert_eq!(Queue::size_on(&device(4_194_303, true)), (131_072, 512));
    // A device with too few completions for one connection still serves one.
    assert_eq!(Queue::size_on(&device(16, true)), (16, 1));
    assert_eq!(Queue::size_on(soft::open().unwrap().attributes()), (1 << 20, 4096));
}

#[test]
fn a_full_queue_takes_no_participant_until_one_leaves() {
    let queue = Queue::new(&*soft::open().unwrap(), None, &Arc::default()).unwrap();
    let add = |number| queue.add(|_| Ok::<_, VerbsError>(Arc::new(Silent(QueuePairNumber(number)))));
    let (key, first) = add(0).unwrap().unwrap();
    for number in 1..queue.limit as u32 {
        add(number).unwrap().unwrap();
    }
    assert!(add(u32::MAX).is_err(), "more than {} participants", queue.limit);
    queue.remove(key, &*first);
    add(u32::MAX).unwrap().unwrap();
    assert!(add(0).is_err());
}
