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

    fn handle_completions(&self, completions: &[WorkCompletion], _: &mut Deferred) {
        panic!("nothing was posted, but {completions:?} came");
    }

    fn fail_with_device(&self) {}

    fn fail_after_panic(&self) {}
}

#[test]
fn the_length_of_a_queue_follows_the_device() {
    let capacity = |max_completions, locks_memory| {
        let mut device = DeviceAttributes::new("ibverbs", "a device");
        device.max_completions = max_completions;
        device.locks_memory = locks_memory;
        Queue::capacity_on(&device)
    };
    // `max_cqe` of rdma_rxe, and of an mlx5 card.
    assert_eq!(capacity(32_767, true), 32_767);
    assert_eq!(capacity(4_194_303, true), 131_072);
    assert_eq!(capacity(4_194_303, false), 4_194_303);
}

/// A participant's requests may all complete at once, if its queue pair fails. The queue of all participants
/// has room for that.
#[test]
fn a_full_queue_takes_no_participant_until_one_leaves() {
    let queue = Queue::new(&*soft::open().unwrap(), None, &Arc::default()).unwrap();
    // Most sends, READs and receives of a connection, by the rules of the configuration.
    let completions = 4096 + 16 + 1024;
    let add = |number, completions| {
        queue.add(completions, |_| Ok::<_, VerbsError>(Arc::new(Silent(QueuePairNumber(number)))))
    };
    let (key, first) = add(0, completions).unwrap().unwrap();
    let fit = queue.capacity / completions;
    for number in 1..fit {
        add(number, completions).unwrap().unwrap();
    }
    assert!(
        add(fit, completions).is_err(),
        "{fit} participants with {completions} completions each are in {}",
        queue.capacity
    );
    // A participant that could not be made takes no room.
    let left = queue.capacity - fit * completions;
    let failed = queue.add(left, |_| Err::<Arc<Silent>, _>("not made"));
    assert!(failed.unwrap().is_err());
    add(fit, left).unwrap().unwrap();
    assert!(add(fit + 1, 1).is_err());
    queue.remove(key, &*first);
    assert!(add(fit + 1, completions + 1).is_err());
    add(fit + 1, completions).unwrap().unwrap();
}
