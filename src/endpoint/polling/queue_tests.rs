#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::*;
use tonic_rdma_verbs::counting::{Counter, Limits, wrap};
use tonic_rdma_verbs::soft;

/// A participant that has no completions.
#[derive(Debug)]
pub(crate) struct Silent(pub(crate) QueuePairNumber);

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

/// Most sends, READs and receives of a connection, by the rules of the configuration.
const COMPLETIONS: u32 = 4096 + 16 + 1024;

/// Opens the software device with room for `completions` in a queue.
fn device(completions: u32) -> Arc<dyn Context> {
    let counter = Counter::new();
    let mut limits = Limits::CARD;
    limits.completions = completions;
    counter.limit(limits);
    wrap(soft::open().unwrap(), &counter)
}

fn add(queue: &Queue, number: u32, completions: u32) -> Result<(u32, Arc<Silent>), QueueFull> {
    let added = queue.add(completions, |_| Ok::<_, VerbsError>(Arc::new(Silent(QueuePairNumber(number)))));
    added.map(Result::unwrap)
}

#[test]
fn a_queue_begins_short_and_grows_with_its_participants_up_to_the_limit_of_the_device() {
    let capacity = |queue: &Queue| lock(&queue.participants).capacity;
    // `max_cqe` of rdma_rxe.
    let queue = Queue::new(&*device(32_767), None, &Arc::default()).unwrap();
    assert_eq!(capacity(&queue), 32_767);
    let most = Limits::CARD.completions;
    let queue = Queue::new(&*device(most), None, &Arc::default()).unwrap();
    assert_eq!(capacity(&queue), 131_071);
    let fit = most / COMPLETIONS;
    for number in 0..fit {
        add(&queue, number, COMPLETIONS).unwrap();
        let (needed, has) = ((number + 1) * COMPLETIONS, capacity(&queue));
        assert!(needed <= has && has <= most.min((2 * needed).max(131_071)), "{needed}, {has}");
    }
    assert_eq!(
        add(&queue, fit, COMPLETIONS).unwrap_err().to_string(),
        "the completion queue of soft0 has room for 4194303 completions, and its 816 queue pairs leave too few \
         for another; RDMA_COMPLETION_QUEUES adds queues"
    );
}

/// A device may state longer queues than it has memory for.
#[test]
fn a_queue_that_can_not_grow_says_why() {
    let counter = Counter::new();
    let device = wrap(soft::open().unwrap(), &counter);
    let queue = Queue::new(&*device, None, &Arc::default()).unwrap();
    let mut limits = Limits::CARD;
    limits.completions = 131_071;
    counter.limit(limits);
    (0..25).for_each(|number| _ = add(&queue, number, COMPLETIONS).unwrap());
    assert_eq!(
        add(&queue, 25, COMPLETIONS).unwrap_err().to_string(),
        "the completion queue of soft0 has room for 131071 completions, and its 25 queue pairs leave too few for \
         another (it can't grow: completion queue depth: asked for 133536, the device has 131071); \
         RDMA_COMPLETION_QUEUES adds queues"
    );
}

/// A participant's requests may all complete at once, if its queue pair fails. The queue of all participants
/// has room for that.
#[test]
fn a_full_queue_takes_no_participant_until_one_leaves() {
    let capacity = 131_071;
    let queue = Queue::new(&*device(capacity), None, &Arc::default()).unwrap();
    let completions = COMPLETIONS;
    let (key, first) = add(&queue, 0, completions).unwrap();
    let fit = capacity / completions;
    for number in 1..fit {
        add(&queue, number, completions).unwrap();
    }
    assert!(
        add(&queue, fit, completions).is_err(),
        "{fit} participants with {completions} completions each are in {capacity}"
    );
    // A participant that could not be made takes no room.
    let left = capacity - fit * completions;
    let failed = queue.add(left, |_| Err::<Arc<Silent>, _>("not made"));
    assert!(failed.unwrap().is_err());
    add(&queue, fit, left).unwrap();
    assert!(add(&queue, fit + 1, 1).is_err());
    queue.remove(key, &*first);
    assert!(add(&queue, fit + 1, completions + 1).is_err());
    add(&queue, fit + 1, completions).unwrap();
}

/// Makes a task ready, as a call that waits does.
#[derive(Debug)]
struct MakesTask;

impl Run for MakesTask {
    fn run(self: Arc<Self>) {
        crate::endpoint::task_is_ready();
    }
}

#[test]
fn a_call_that_becomes_a_task_counts_as_a_woken_task() {
    let queue = Queue::new(&*soft::open().unwrap(), None, &Arc::default()).unwrap();
    for _ in 0..2 {
        let mut batch = lock(&queue.batch);
        batch.after.runs.push(Arc::new(MakesTask));
        assert_eq!(queue.carry_out(batch), (1, 1));
    }
}
