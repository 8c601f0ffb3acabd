//! Completion queues and queue pairs of a group, and how many ranks a card has room for.

use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::{Child, free_address, is_alone, is_alone_with};
use tonic_rdma::Config;
use tonic_rdma_collective::{CollectiveError, Communicator, Launch, PlanChoice, Reduction};
use tonic_rdma_verbs::counting::{self, Counts, Limits};

/// Long enough for a busy machine; only a hang takes so long.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// Makes these ranks of a group on threads of their own, and adds their numbers. Then each of them calls `then`,
/// before any of them leaves. If one has failed, `then` is not called.
pub(crate) fn ranks(
    numbers: Range<usize>,
    size: usize,
    address: &str,
    config: Option<&Config>,
    then: impl Fn(usize) + Sync,
) -> Vec<Result<(), CollectiveError>> {
    let all_have_added = Barrier::new(numbers.len());
    let has_failed = AtomicBool::new(false);
    let add = |rank: usize| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let builder = Communicator::builder().launch(Launch::new(rank, size, address));
        let builder = builder.plans(PlanChoice::Default).deadline(LIMIT).bootstrap_timeout(LIMIT);
        let builder = config.map_or(builder.clone(), |config| builder.config(config.clone()));
        let communicator = runtime.block_on(builder.connect())?;
        let mut sum = [rank as f64];
        communicator.all_reduce(&mut sum[..], Reduction::Sum).wait()?;
        assert_eq!(sum, [(size * (size - 1) / 2) as f64]);
        Ok((communicator, runtime))
    };
    let rank = |rank: usize| {
        let added = add(rank);
        has_failed.fetch_or(added.is_err(), Ordering::Relaxed);
        // Those that failed come here, too, so that the others do not wait forever.
        all_have_added.wait();
        if !has_failed.load(Ordering::Relaxed) {
            then(rank);
        }
        all_have_added.wait();
        added.map(drop)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = numbers.map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Makes a group in this process. Returns what it had asked for when all ranks had added their numbers.
fn group(size: usize, config: Option<&Config>) -> Counts {
    let counter = counting::count_all();
    let before = counter.counts();
    let counts = std::sync::Mutex::new(Counts::default());
    let added = ranks(0..size, size, &free_address(), config, |rank| {
        if rank == 0 {
            *counts.lock().unwrap() = counter.counts().since(&before);
        }
    });
    added.into_iter().for_each(|added| added.unwrap());
    counts.into_inner().unwrap()
}

/// Returns the number of queue pairs of a group, with this number for each link and one for its calls. Each rank
/// opens a link to each other one.
fn queue_pairs(size: u64, of_link: u64) -> u64 {
    2 * size * (size - 1) * (1 + of_link)
}

#[test]
fn variables_and_the_builder_set_the_numbers() {
    // The last one spares a real device its calibration.
    let variables = [
        ("RDMA_COMPLETION_QUEUES", "2"),
        ("RDMA_QUEUE_PAIRS_PER_PEER", "3"),
        ("RDMA_EAGER_THRESHOLD", "32k"),
    ];
    if !is_alone_with(concat!(module_path!(), "::variables_and_the_builder_set_the_numbers"), &variables) {
        return;
    }
    let made = |config: Option<Config>| {
        let counts = group(3, config.as_ref());
        (counts.completion_queues.created, counts.queue_pairs.created)
    };
    let config = || Config::from_env().unwrap();
    assert_eq!(made(None), (3 * 2, queue_pairs(3, 3)));
    assert_eq!(made(Some(config().completion_queues(4))), (3 * 4, queue_pairs(3, 3)));
    assert_eq!(made(Some(config().queue_pairs_per_peer(4))), (3 * 2, queue_pairs(3, 4)));
    assert_eq!(made(Some(Config::default())), (3, queue_pairs(3, 1)));
}

#[test]
fn a_wrong_variable_is_named() {
    let variables = [("RDMA_QUEUE_PAIRS_PER_PEER", "none")];
    if !is_alone_with(concat!(module_path!(), "::a_wrong_variable_is_named"), &variables) {
        return;
    }
    let error = ranks(0..1, 1, &free_address(), None, |_| {}).pop().unwrap().unwrap_err();
    let expected = "RDMA_QUEUE_PAIRS_PER_PEER=\"none\": takes a number from 1 to 64";
    assert!(error.to_string().ends_with(expected), "{error}");
}

/// How many ranks of the large group each process has: one process has not enough descriptors.
pub(crate) const OF_PROCESS: usize = 16;

/// Returns the number of ranks of the large group. 64 ranks need a machine that has nothing else to do.
pub(crate) fn ranks_of_large_group() -> usize {
    std::env::var("COLLECTIVE_CARD_RANKS").map_or(2 * OF_PROCESS, |ranks| ranks.parse().unwrap())
}

/// Starts all ranks, each of which adds. Returns `None` if one of them has failed.
fn start_all() -> Option<Vec<Child>> {
    let address = free_address();
    let start = |first| {
        let role = format!("ranks {first} {address}");
        // A child announces something when all ranks have added their numbers.
        std::thread::spawn(move || Child::start(&[], &role))
    };
    let starting: Vec<_> = (0..ranks_of_large_group()).step_by(OF_PROCESS).map(start).collect();
    let started: Vec<_> = starting.into_iter().map(|child| child.join().ok()).collect();
    started.into_iter().collect()
}

#[test]
fn a_card_has_room_for_a_large_group() {
    let size = ranks_of_large_group() as u64;
    // On a busy machine the software device of a process may answer too late. Then another group takes its place.
    let children = (0..5).find_map(|_| start_all()).expect("a group has started");
    let mut sums = [0; 4];
    for child in &children {
        let counts: Vec<u64> = child.word.split(' ').map(|count| count.parse().unwrap()).collect();
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let [completion_queues, queue_pairs_of_all, domains, regions] = sums;
    assert_eq!(completion_queues, size, "one for each rank");
    assert_eq!(queue_pairs_of_all, queue_pairs(size, 1));
    // One card would have room for 64 ranks, too. They have as much for each pair.
    let (card, pairs) = (Limits::CARD, |ranks: u64| ranks * (ranks - 1));
    let of_64 = [queue_pairs_of_all, domains, regions].map(|count| count * pairs(64) / pairs(size));
    let room = [card.queue_pairs, card.domains, card.regions].map(u64::from);
    assert!(of_64.iter().zip(room).all(|(count, room)| *count <= room), "{of_64:?} {room:?}");
    children.into_iter().for_each(Child::ends);
}

#[test]
fn a_rank_that_a_device_has_no_room_for_is_refused_with_the_limit() {
    if !is_alone(concat!(module_path!(), "::a_rank_that_a_device_has_no_room_for_is_refused_with_the_limit"))
    {
        return;
    }
    let counter = counting::count_all();
    let mut limits = Limits::CARD;
    limits.completions = 16_383;
    counter.limit(limits);
    assert_eq!(group(4, Some(&Config::default())).queue_pairs.created, queue_pairs(4, 1));
    let refused = ranks(0..8, 8, &free_address(), Some(&Config::default()), |_| {});
    let errors: Vec<_> = refused.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    let is_clear = |error: &&String| {
        error.contains("no channel to rank")
            && error.contains("the completion queue of soft0 has room for 16383 completions, and its ")
            && error.contains("leave too few for another; RDMA_COMPLETION_QUEUES adds queues")
    };
    assert!(errors.iter().any(|error| is_clear(&error)), "{errors:#?}");
    // The advice helps.
    let queues = Config::default().completion_queues(4);
    assert_eq!(group(8, Some(&queues)).queue_pairs.created, queue_pairs(8, 1));
}
