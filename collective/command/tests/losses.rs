//! Ranks that are killed or stopped, and what the others do.
//!
//! The ranks are processes: this test's own program, started again. They reduce operands whose sums depend on
//! the order of additions. In each trial one rank kills or stops itself before a certain step of a certain
//! algorithm. The others say when they noticed it, shrink the group, and reduce all combinations of
//! algorithms and kinds of messages. All bits of the results must be those of a fresh group of that size. One
//! group of processes serves many trials. With `--nocapture` the tests print how long the ranks took.
//!
//! `COLLECTIVE_KILLS` and `COLLECTIVE_STOPS` set how many ranks are lost (`all`: one before each step of each
//! algorithm), and `COLLECTIVE_RANKS` in groups of which sizes, such as `2,3,8`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::sys::signal::{
    Signal::{SIGKILL, SIGSTOP},
    raise,
};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tonic_rdma_collective::unstable::watch_steps;
use tonic_rdma_collective::{
    Algorithm, CollectiveError, CollectiveErrorKind, Communicator, Launch, PlanChoice, Reduction,
};
use tonic_rdma_commands::process::{self, Child, Event, Signal};
use tonic_rdma_commands::statistics::quantile;
use tonic_rdma_commands::table::grid;

/// The variable by which a process is a rank.
const RANK: &str = "COLLECTIVE_TEST_RANK";
/// The longest time without a message of any rank, and the deadline of operations where ranks are killed.
/// Only a hang takes so long.
const HANG: Duration = Duration::from_secs(120);
/// The deadline of an operation where a rank is stopped.
const STOPPED: Duration = Duration::from_secs(1);
/// Operations after the one in which a rank is lost. The survivors notice long before.
const AFTER: u64 = 1_000;
/// The step of a rank that is lost after the last step of an operation.
const END: u32 = u32::MAX;
/// All algorithms with all kinds of messages, and a number of elements to which [`PLANS`] gives this
/// algorithm. The numbers are not multiples of the numbers of ranks.
const COMBINATIONS: [(Algorithm, &str, usize); 12] = [
    (Algorithm::OneShot, "tiny", 7),
    (Algorithm::HalvingDoubling, "tiny", 13),
    (Algorithm::Ring, "tiny", 29),
    (Algorithm::Hierarchical, "tiny", 43),
    (Algorithm::OneShot, "inline", 1_003),
    (Algorithm::HalvingDoubling, "inline", 2_005),
    (Algorithm::Ring, "inline", 3_001),
    (Algorithm::Hierarchical, "inline", 6_007),
    (Algorithm::OneShot, "reference", 10_007),
    (Algorithm::HalvingDoubling, "reference", 50_021),
    (Algorithm::Ring, "reference", 100_003),
    (Algorithm::Hierarchical, "reference", 200_003),
];
const PLANS: &str = "one-shot:..32,halving-doubling:..64,ring:..128,hierarchical:..256,\
                     one-shot:..4KiB,halving-doubling:..8KiB,ring:..16KiB,hierarchical:..32KiB,\
                     one-shot:..64KiB,halving-doubling/64KiB:..256KiB,ring/32KiB:..512KiB,hierarchical/64KiB:..";

/// How a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Loss {
    Kill,
    Stop,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Trial {
    number: u64,
    /// The ranks of the group before.
    size: usize,
    /// The index of the combination.
    combination: usize,
    /// The rank that is lost.
    victim: usize,
    /// The step before which it is lost, or [`END`].
    step: u32,
}

/// What a process must know to be a rank. Each trial takes a rank from the group of the trial before.
#[derive(Debug, Serialize, Deserialize)]
struct Work {
    rank: usize,
    size: usize,
    address: String,
    /// The process that started the ranks.
    parent: u32,
    loss: Loss,
    trials: Vec<Trial>,
}

/// A message of a rank.
#[derive(Debug, Serialize, Deserialize)]
struct RankMessage {
    /// `None` in a fresh group.
    trial: Option<u64>,
    /// The time of the clock that all processes of this machine share, in nanoseconds.
    at: u64,
    content: Content,
}

#[derive(Debug, Serialize, Deserialize)]
enum Content {
    /// The rank is about to end or to stop itself before this step.
    Gone(u32),
    /// An operation failed. `named`: the error names the rank that was lost.
    Noticed {
        named: bool,
        error: String,
    },
    /// A result of the new group.
    FirstResult,
    /// The fingerprints of the results of all combinations, and the number of wrong elements.
    Works {
        hashes: Vec<u64>,
        wrong: usize,
    },
    /// The steps of this rank in each combination.
    Steps {
        rank: usize,
        steps: Vec<u32>,
    },
    /// A stopped rank has gone on, and learnt how its group ended for it.
    Resumed {
        excluded: bool,
        outcome: String,
    },
    Failed(String),
}

// ---- A rank ----

/// A rank. Does nothing unless a test below has started this process.
#[test]
fn rank() {
    let Some(work) = std::env::var_os(RANK) else { return };
    if let Err(failure) = take_part(&serde_json::from_str(work.to_str().unwrap()).unwrap()) {
        send(None, Content::Failed(failure.to_string()));
    }
}

fn take_part(work: &Work) -> Result<(), Box<dyn Error>> {
    process::end_with(work.parent)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    // Others know of a stopped rank only that it does not answer. A killed one is known to be gone.
    let (limit, answer) = if work.loss == Loss::Kill { (HANG, HANG / 10) } else { (STOPPED, STOPPED / 2) };
    let builder = Communicator::builder().plans(PlanChoice::Pinned(PLANS.parse()?));
    let builder = builder.deadline(limit).answer_timeout(answer).launch(Launch::new(
        work.rank,
        work.size,
        work.address.clone(),
    ));
    let mut communicator = runtime.block_on(builder.connect())?;
    if work.trials.is_empty() {
        send(None, Content::Steps { rank: work.rank, steps: steps(&communicator)? });
    }
    let mut hashes = results(&communicator, None, 0)?;
    for trial in &work.trials {
        let number = trial.number;
        let error = lose(&communicator, trial, work.loss, &hashes)?;
        let stopped = work.loss == Loss::Stop && communicator.rank() == trial.victim;
        communicator = match runtime.block_on(communicator.shrink()) {
            Ok(smaller) if !stopped => smaller,
            Err(failed) if !stopped => {
                return Err(format!("trial {number}: no group of survivors after {error}: {failed}").into());
            }
            resumed => {
                let kind = resumed.as_ref().err().map(CollectiveError::kind);
                let excluded = kind == Some(CollectiveErrorKind::Excluded);
                send(Some(number), Content::Resumed { excluded, outcome: format!("{resumed:?}") });
                return Ok(());
            }
        };
        hashes = results(&communicator, Some(number), trial.combination)?;
    }
    communicator.barrier().wait()?;
    // A stopped rank that goes on has to find the group without it, and not its end. The parent closes the
    // input.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Returns the steps of this rank in each combination.
fn steps(communicator: &Communicator) -> Result<Vec<u32>, CollectiveError> {
    let seen = Arc::new(AtomicU32::new(0));
    let watched = Arc::clone(&seen);
    watch_steps(communicator, move |at| watched.store(at.steps, Ordering::Relaxed));
    let of = |combination| reduce(communicator, combination, true).map(|_| seen.swap(0, Ordering::Relaxed));
    let all = (0..COMBINATIONS.len()).map(of).collect();
    watch_steps(communicator, |_| {});
    all
}

/// Reduces each combination once, says that the group works, and returns the fingerprints of the results.
fn results(
    communicator: &Communicator,
    trial: Option<u64>,
    first: usize,
) -> Result<Vec<u64>, Box<dyn Error>> {
    let (size, mut hashes, mut wrong) = (communicator.size(), vec![0; COMBINATIONS.len()], 0);
    for index in 0..COMBINATIONS.len() {
        let combination = (first + index) % COMBINATIONS.len();
        let result = reduce(communicator, combination, index.is_multiple_of(2)).map_err(|error| {
            format!("after trial {trial:?}, combination {combination}, {size} ranks: {error}")
        })?;
        if index == 0 {
            send(trial, Content::FirstResult);
        }
        hashes[combination] = fingerprint(&result);
        wrong += wrong_elements(size, &result);
    }
    send(trial, Content::Works { hashes: hashes.clone(), wrong });
    Ok(hashes)
}

/// Reduces until an operation fails because a rank is lost: this one, if it is the victim. Returns the error.
fn lose(
    communicator: &Communicator,
    trial: &Trial,
    loss: Loss,
    hashes: &[u64],
) -> Result<CollectiveError, String> {
    let Trial { number, combination, victim, step, .. } = *trial;
    let is_victim = communicator.rank() == victim;
    let noticed = |error: CollectiveError| {
        if !is_victim {
            let named = names(&error, victim);
            send(Some(number), Content::Noticed { named, error: error.to_string() });
        }
        Ok(error)
    };
    // All ranks have ended the operations before: those do not belong to this trial.
    if let Err(failed) = communicator.barrier().wait() {
        return noticed(failed.into());
    }
    let armed = Arc::new(AtomicBool::new(false));
    if is_victim {
        let armed = Arc::clone(&armed);
        watch_steps(communicator, move |at| {
            if at.step == step && armed.swap(false, Ordering::Relaxed) {
                lose_itself(loss, number, step);
            }
        });
    }
    // Up to three operations succeed before.
    let before = number % 4;
    for operation in 0..before + AFTER {
        let fatal = is_victim && operation == before;
        armed.store(fatal, Ordering::Relaxed);
        match reduce(communicator, combination, (number + operation).is_multiple_of(2)) {
            Ok(result) if fingerprint(&result) != hashes[combination] => {
                return Err(format!("trial {number}: a result of combination {combination} changed"));
            }
            Ok(_) => {}
            Err(error) => return noticed(error),
        }
        if fatal && armed.swap(false, Ordering::Relaxed) {
            lose_itself(loss, number, END);
        }
    }
    Err(format!("trial {number}: {AFTER} operations succeeded after a rank was lost"))
}

fn lose_itself(loss: Loss, trial: u64, step: u32) {
    send(Some(trial), Content::Gone(step));
    // A signal to this thread stops the process before the call returns. A signal to the process goes to its
    // main thread, and this one would run on until that is scheduled.
    raise(if loss == Loss::Kill { SIGKILL } else { SIGSTOP }).unwrap();
}

/// Reduces the operands of a combination, in registered memory or in a slice.
fn reduce(
    communicator: &Communicator,
    combination: usize,
    registered: bool,
) -> Result<Vec<f32>, CollectiveError> {
    let rank = communicator.rank();
    let mut slice: Vec<f32> = (0..COMBINATIONS[combination].2).map(|index| element(rank, index)).collect();
    if registered {
        let mut buffer = communicator.allocate::<f32>(slice.len())?;
        buffer.copy_from_slice(&slice);
        return Ok(communicator.all_reduce(buffer, Reduction::Sum).wait()?.to_vec());
    }
    communicator.all_reduce(&mut slice[..], Reduction::Sum).wait()?;
    Ok(slice)
}

/// Returns whether the error says that this rank is lost.
fn names(error: &CollectiveError, lost: usize) -> bool {
    let says = |what: &str| error.reason().contains(&format!("rank {lost} {what}"));
    says("is lost") || says("did not answer")
}

/// Writes a message with one call, so that a rank that ends at once has written all of it.
fn send(trial: Option<u64>, content: Content) {
    let time = clock_gettime(ClockId::Monotonic);
    let at = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
    let line = format!("\n> {}\n", serde_json::to_string(&RankMessage { trial, at, content }).unwrap());
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).unwrap();
}

/// Returns the element of a rank: of many magnitudes, so that another order of additions gives another sum.
fn element(rank: usize, index: usize) -> f32 {
    let mixed = (index as u32 + 1).wrapping_mul(2_654_435_761) ^ (rank as u32 + 1).wrapping_mul(0x9e37_79b1);
    let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca6b);
    ((mixed & 0xffff) as f32 - 32_000.0) / 7.0 / f32::from(1_u16 << (mixed >> 28))
}

/// Returns how many elements are no sum of the operands of so many ranks. The order of additions may change a
/// sum by rounding.
fn wrong_elements(size: usize, result: &[f32]) -> usize {
    let is_right = |(index, value): (usize, &f32)| {
        let terms = (0..size).map(|rank| f64::from(element(rank, index)));
        let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
        (f64::from(*value) - sum).abs() <= magnitude * 1e-5
    };
    result.iter().enumerate().filter(|each| !is_right(*each)).count()
}

/// Returns a fingerprint of all bits of a result (FNV-1a over words).
fn fingerprint(result: &[f32]) -> u64 {
    let step = |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3);
    result.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

// ---- The test that starts them ----

/// Starts the ranks of a group, and collects their messages until all have ended. A stopped rank goes on when
/// all others have a new group.
fn run_ranks(size: usize, loss: Loss, trials: &[Trial]) -> Vec<RankMessage> {
    let (address, parent) = (support::free_address(), std::process::id());
    let (sender, events) = channel();
    let start = |rank| {
        let work = Work { rank, size, address: address.clone(), parent, loss, trials: trials.to_vec() };
        let (mut command, sender) = (process::again().unwrap(), sender.clone());
        command.args(["--exact", "rank", "--nocapture"]).env(RANK, serde_json::to_string(&work).unwrap());
        Child::start(format!("rank {rank}"), command, move |event| sender.send((rank, event)).is_ok())
            .unwrap()
    };
    let mut children: Vec<Child> = (0..size).map(start).collect();
    let (mut all, mut stopped, mut running) = (Vec::new(), BTreeMap::new(), size);
    let mut to_resume = if loss == Loss::Stop { trials.len() } else { 0 };
    while running > 0 {
        if to_resume == 0 {
            // All may end.
            children.iter_mut().for_each(Child::close);
        }
        let (rank, message) = match events.recv_timeout(HANG) {
            Ok((rank, Event::Report(line))) => {
                // The harness writes lines too.
                let Some(line) = line.strip_prefix("> ") else { continue };
                (rank, serde_json::from_str::<RankMessage>(line).unwrap())
            }
            Ok((_, event)) => {
                running -= usize::from(matches!(event, Event::Ended(_)));
                continue;
            }
            Err(_) => panic!("no rank said anything for {HANG:?} after {all:?}"),
        };
        match (&message.content, trials.iter().find(|trial| Some(trial.number) == message.trial)) {
            (Content::Gone(_), Some(trial)) if loss == Loss::Stop => {
                stopped.insert(trial.number, (rank, trial.size - 1));
            }
            (Content::Works { .. }, Some(trial)) => {
                if let Some((rank, waiting)) = stopped.get_mut(&trial.number) {
                    *waiting -= 1;
                    if *waiting == 0 {
                        children[*rank].signal(Signal::CONT).unwrap();
                    }
                }
            }
            (Content::Resumed { .. }, _) => to_resume = to_resume.saturating_sub(1),
            (Content::Failed(_), _) if loss == Loss::Stop => {
                // The batch has failed. A stopped rank would never end.
                to_resume = 0;
                process::end_all(&mut children, Duration::ZERO);
            }
            _ => {}
        }
        all.push(message);
    }
    all
}

/// A group in which no rank was lost: the fingerprints of its results, and the steps of each rank for each
/// combination.
struct FreshGroup {
    hashes: Vec<u64>,
    steps: BTreeMap<usize, Vec<u32>>,
}

fn fresh(size: usize, loss: Loss) -> FreshGroup {
    let message = run_ranks(size, loss, &[]);
    let (mut all, mut steps) = (Vec::new(), BTreeMap::new());
    for message in message {
        match message.content {
            Content::Works { hashes, wrong: 0 } => all.push(hashes),
            Content::Steps { rank, steps: of_rank } => drop(steps.insert(rank, of_rank)),
            Content::FirstResult => {}
            other => panic!("a fresh group of {size} ranks: {other:?}"),
        }
    }
    assert_eq!((all.len(), steps.len()), (size, size));
    assert!(all.iter().all(|hashes| *hashes == all[0]), "the ranks of a fresh group of {size} differ");
    FreshGroup { hashes: all.swap_remove(0), steps }
}

/// Where a rank can be lost: combination, step, and the ranks that come there.
type LossPoint = (usize, u32, Vec<usize>);

/// Returns all points of a group at which a rank can be lost. The combinations alternate, and the steps of
/// each come in an order that spreads.
fn points(fresh: &FreshGroup) -> Vec<LossPoint> {
    let mut all = Vec::new();
    for combination in 0..COMBINATIONS.len() {
        let most = fresh.steps.values().map(|steps| steps[combination]).max().unwrap();
        let mut steps: Vec<u32> = (0..most).chain([END]).collect();
        // The fraction of the product with the golden ratio spreads numbers that follow one another.
        steps.sort_by_key(|step| step.wrapping_mul(2_654_435_769));
        for (pass, step) in steps.into_iter().enumerate() {
            let comes = |(rank, steps): (&usize, &Vec<u32>)| {
                (step == END || step < steps[combination]).then_some(*rank)
            };
            all.push((pass, combination, step, fresh.steps.iter().filter_map(comes).collect()));
        }
    }
    all.sort_by_key(|(pass, combination, ..)| (*pass, *combination));
    all.into_iter().map(|(_, combination, step, ranks)| (combination, step, ranks)).collect()
}

/// The trials of one algorithm with one number of ranks. Times are in milliseconds from the loss of a rank to
/// the slowest survivor.
#[derive(Default)]
struct Row {
    reached: BTreeSet<(usize, u32)>,
    known: Vec<f64>,
    goes_on: Vec<f64>,
}

/// Returns whether no result of a trial differs from those of a fresh group. A trial may have no result.
fn results_are_right(trial: &Trial, messages: &[RankMessage], fresh: &FreshGroup) -> bool {
    messages.iter().filter(|message| message.trial == Some(trial.number) || message.trial.is_none()).all(
        |message| match &message.content {
            Content::Works { hashes, wrong } => {
                *wrong == 0 && (message.trial.is_none() || *hashes == fresh.hashes)
            }
            Content::Gone(step) => *step == trial.step,
            Content::Failed(reason) => !reason.contains("changed") && !reason.contains("succeeded"),
            _ => true,
        },
    )
}

/// Judges a trial by their messages. Returns when all survivors knew of the loss, and when all had a result
/// of the new group.
fn judge(
    trial: &Trial,
    loss: Loss,
    messages: &[RankMessage],
    fresh: &FreshGroup,
) -> Result<(f64, f64), String> {
    let (mut gone, mut known, mut first, mut works, mut excluded) = (None, Vec::new(), Vec::new(), 0, 0);
    for message in messages.iter().filter(|message| message.trial == Some(trial.number)) {
        match &message.content {
            Content::Gone(step) if *step == trial.step => gone = Some(message.at),
            Content::Noticed { named: true, .. } => known.push(message.at),
            Content::FirstResult => first.push(message.at),
            Content::Works { hashes, wrong: 0 } if *hashes == fresh.hashes => works += 1,
            Content::Resumed { excluded: true, .. } => excluded += 1,
            // Another step, a wrong name, wrong elements, other bits than those of a fresh group, or a
            // stopped rank that is not excluded.
            other => return Err(format!("{other:?}")),
        }
    }
    let gone = gone.ok_or("the rank was not lost")?;
    let counts = [known.len(), first.len(), works, excluded];
    let survivors = trial.size - 1;
    if counts != [survivors, survivors, survivors, usize::from(loss == Loss::Stop)] {
        return Err(format!("the ranks that noticed it, that went on, and that were told so are {counts:?}"));
    }
    let slowest = |times: Vec<u64>| times.into_iter().max().unwrap_or(gone).saturating_sub(gone) as f64 / 1e6;
    Ok((slowest(known), slowest(first)))
}

/// Loses this many ranks, unless `variable` sets another number, in groups of these sizes, unless
/// `COLLECTIVE_RANKS` sets others.
fn lose_ranks(loss: Loss, variable: &str, trials: usize, sizes: &[usize]) {
    let sizes: BTreeSet<usize> = match std::env::var("COLLECTIVE_RANKS") {
        Ok(list) => list.split(',').map(|size| size.trim().parse().expect("COLLECTIVE_RANKS")).collect(),
        Err(_) => sizes.iter().copied().collect(),
    };
    assert!(sizes.iter().all(|size| (2..=64).contains(size)), "COLLECTIVE_RANKS: takes numbers from 2 to 64");
    let most = *sizes.last().expect("COLLECTIVE_RANKS");
    let fresh: BTreeMap<usize, FreshGroup> = (1..=most).map(|size| (size, fresh(size, loss))).collect();
    let points: BTreeMap<usize, _> = sizes.iter().map(|size| (*size, points(&fresh[size]))).collect();
    let all: usize = points.values().map(Vec::len).sum();
    let wanted = match std::env::var(variable).as_deref() {
        Ok("all") => all,
        Ok(number) => number.parse().expect(variable),
        Err(_) => trials,
    };
    let mut rows: BTreeMap<(Algorithm, usize), Row> = BTreeMap::new();
    let mut visits: BTreeMap<usize, usize> = sizes.iter().map(|size| (*size, 0)).collect();
    let (mut number, mut faults) = (0, Vec::new());
    while number < wanted {
        let open = |(size, visits): (&usize, &usize)| number >= all || *visits < points[size].len();
        // The largest size of those that had the fewest trials. The next trials are those of the ranks that
        // are left.
        let open_sizes = visits.iter().filter(|it| open(*it));
        let mut size = *open_sizes.min_by_key(|(size, visits)| (**visits, usize::MAX - **size)).unwrap().0;
        let mut batch = Vec::new();
        while number + batch.len() < wanted
            && let Some(visit) = visits.get_mut(&size)
            && open((&size, &*visit))
        {
            let (combination, step, ranks) = &points[&size][*visit % points[&size].len()];
            // A second pass takes other ranks at the same steps.
            let victim = ranks[(*visit + *visit / points[&size].len()) % ranks.len()];
            let number = (number + batch.len()) as u64;
            batch.push(Trial { number, size, combination: *combination, victim, step: *step });
            *visit += 1;
            size -= 1;
        }
        let mut messages = run_ranks(batch[0].size, loss, &batch);
        // On a busy machine a living rank too may not answer in time. That excuses no wrong result.
        for _ in 0..if loss == Loss::Stop { 3 } else { 0 } {
            let is_bad = |trial: &Trial| judge(trial, loss, &messages, &fresh[&(trial.size - 1)]).is_err();
            let is_right = |trial: &Trial| results_are_right(trial, &messages, &fresh[&(trial.size - 1)]);
            if batch.iter().any(is_bad) && batch.iter().all(is_right) {
                println!("once more, because of {messages:?}");
                messages = run_ranks(batch[0].size, loss, &batch);
            }
        }
        for trial in &batch {
            let (algorithm, kind, _) = COMBINATIONS[trial.combination];
            let row = rows.entry((algorithm, trial.size)).or_default();
            match judge(trial, loss, &messages, &fresh[&(trial.size - 1)]) {
                Ok((known, goes_on)) => {
                    row.known.push(known);
                    row.goes_on.push(goes_on);
                    row.reached.insert((trial.combination, trial.step));
                }
                Err(fault) => {
                    let failed =
                        messages.iter().filter(|message| matches!(message.content, Content::Failed(_)));
                    let failed: Vec<_> = failed.collect();
                    faults.push(format!("{trial:?}, {algorithm} {kind}: {fault}; {failed:?}"));
                }
            }
        }
        number += batch.len();
    }
    println!(
        "{}\nms from a loss until the slowest survivor knows, and has a new result",
        table(&rows, &points)
    );
    assert!(faults.is_empty(), "{} faults in {wanted} trials:\n{}", faults.len(), faults.join("\n"));
    let reached: usize = rows.values().map(|row| row.reached.len()).sum();
    assert_eq!(reached, wanted.min(all), "a step counts once, and each trial has a step of its own");
}

fn table(rows: &BTreeMap<(Algorithm, usize), Row>, points: &BTreeMap<usize, Vec<LossPoint>>) -> String {
    let line = |((algorithm, size), row): (&(Algorithm, usize), &Row)| {
        let is = |point: &&LossPoint| COMBINATIONS[point.0].0 == *algorithm;
        let steps = points[size].iter().filter(is).count();
        let mut line = vec![algorithm.to_string(), size.to_string(), row.known.len().to_string()];
        line.push(format!("{}/{steps}", row.reached.len()));
        for times in [&row.known, &row.goes_on] {
            let at = |share| format!("{:.1}", quantile(times.iter().copied(), share));
            line.extend([0.5, 0.99, 1.0].map(at));
        }
        line
    };
    let headings =
        ["algorithm", "ranks", "lost", "steps", "known p50", "p99", "max", "goes on p50", "p99", "max"];
    grid(&headings, [rows.iter().map(line).collect()]).to_string()
}

#[test]
fn killed_ranks_are_named_and_the_others_have_the_results_of_a_fresh_group() {
    lose_ranks(Loss::Kill, "COLLECTIVE_KILLS", 45, &[2, 3, 4, 5, 6]);
}

#[test]
fn stopped_ranks_are_named_at_the_deadline_and_excluded() {
    lose_ranks(Loss::Stop, "COLLECTIVE_STOPS", 6, &[2, 3, 4]);
}
