//! The scenarios: each runs in a process of its own, beside an honest neighbour.

use std::io::Write as _;
use std::time::{Duration, Instant};

use tonic_rdma_verbs::{CompletionStatus, VerbsErrorKind, WorkCompletion};

use crate::end::{LARGE, fresh_region, segment, wait_until};
use crate::hostile::{self, KNOCKS};
use crate::meter::{Cost, Usage, Warnings};
use crate::neighbour::{TARGETS, nap};
use crate::process::{Process, are_strangers};
use crate::victim::{Bad, MEMORIES, Victim, fill, wrong_bytes};

/// The environment variable by which a run is made longer: a factor.
const LONGER: &str = "TONIC_RDMA_NEIGHBOURS_LONGER";
/// The environment variable with the number of stops.
const STOPS: &str = "TONIC_RDMA_NEIGHBOURS_STOPS";

/// Processor time that dropping a connection may take, beside a peer that stopped. A wait for the peer takes
/// a second.
const DROP: Duration = Duration::from_millis(200);
/// Least time of a drop that may have waited for a peer that stopped.
const LONG_WAIT: Duration = Duration::from_millis(900);
/// Most rounds until each call has returned at once in one of them. On a busy machine, a call may wait for a
/// thread of this process that has a lock and no core.
const ROUNDS: usize = 20;
/// What a neighbour does when it is stopped.
const WORK: [&str; 5] = ["writes", "writes", "sends", "reads", "all"];
/// What a process may hold for one neighbour that floods it.
const BOUND: Usage = Usage { resident_kib: 96 << 10, descriptors: 256, mappings: 1200 };
/// What may be left when the neighbour is gone.
const LEFT: Usage = Usage { resident_kib: 24 << 10, descriptors: 4, mappings: 16 };

/// The names of the scenarios, and their functions.
pub const ALL: &[(&str, fn())] = &[
    ("alone", || {
        let mut victim = Victim::new();
        (0..times(300)).for_each(|_| victim.call(None));
    }),
    ("idle", || misbehave("target", Fate::Lives)),
    ("transfer", || misbehave("transfer all", Fate::Lives)),
    ("scribble zeros", || misbehave("scribble zeros", Fate::Ends)),
    ("scribble ones", || misbehave("scribble ones", Fate::Ends)),
    ("scribble counters", || misbehave("scribble counters", Fate::Ends)),
    ("scribble random", || misbehave("scribble random", Fate::Ends)),
    ("stop", stop),
    ("stopped calls", || calls_return("stopped")),
    ("deaf calls", || calls_return("deaf")),
    ("flood of messages", flood_of_messages),
    ("flood of segments", flood_of_segments),
    ("flood of sockets", || flood_of_sockets("knock")),
    ("flood of lingering sockets", || flood_of_sockets("knock-lingering")),
    ("fork", fork),
    ("fork that outlives its parent", fork_that_outlives_its_parent),
    ("die", die),
    ("peek", peek),
    ("block", || misbehave("block", Fate::Either)),
    ("swap full-pipe wake-ups", || misbehave("swap full-pipe wake-ups", Fate::Either)),
    ("swap pipe-without-reader wake-ups", || misbehave("swap pipe-without-reader wake-ups", Fate::Either)),
    ("swap truncated small", || misbehave("swap truncated small", Fate::Refused(UNSEALED))),
    ("swap truncated large", || offer("truncated", "/memfd:unsealed", UNSEALED)),
    ("swap huge-pages small", || misbehave("swap huge-pages small", Fate::Refused(HUGE))),
    ("swap huge-pages large", || offer("huge-pages", "/memfd:huge", HUGE)),
    ("swap device small", || misbehave("swap device small", Fate::Refused(NO_MEMORY))),
    ("swap device large", || offer("device", "/dev/zero", NO_MEMORY)),
];

/// Runs the scenario `name`.
pub fn run(name: &str) {
    let (_, scenario) = ALL.iter().find(|(known, _)| *known == name).unwrap();
    scenario();
}

fn times(count: usize) -> usize {
    count * std::env::var(LONGER).map_or(1, |factor| factor.parse().unwrap())
}

fn print(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// What becomes of the connection of a neighbour.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// It goes on, because the neighbour does no harm.
    Lives,
    /// Some connections end: garbage may hit what nobody looks at.
    Ends,
    Either,
    /// It is not made, for this reason.
    Refused(&'static str),
}

/// The reasons for which memory is not mapped.
const UNSEALED: &str = "the peer's segment lacks the seals";
const HUGE: &str = "the peer's segment is not of ordinary pages";
const NO_MEMORY: &str = "the peer's descriptor is no memfd";

/// Starts a neighbour that does harm in the way of `role`, and connects to it. On a busy machine the answer
/// of a device may come too late; then another process takes its place.
fn invite(victim: &Victim, role: &str, fate: Fate) -> (Process, Option<Bad>) {
    const TRIES: usize = 10;
    let mut last = String::new();
    for _ in 0..TRIES {
        let mut process = Process::start();
        let bad = match (victim.invite(&mut process, role), fate) {
            (Ok(_), Fate::Refused(reason)) => panic!("{role}: connected, in spite of: {reason}"),
            (Ok(bad), _) => Some(bad),
            (Err(_), Fate::Either) => None,
            (Err(error), Fate::Refused(reason)) if error.to_string().contains(reason) => None,
            (Err(error), _) => {
                last = error.to_string();
                continue;
            }
        };
        if matches!(fate, Fate::Lives) || process.does_harm() {
            return (process, bad);
        }
    }
    panic!("{role}: {TRIES} neighbours did no harm, or could not connect: {last}");
}

/// Makes calls beside neighbours of the role `role`, one after another. They may end their own connections.
fn misbehave(role: &str, fate: Fate) {
    let mut victim = Victim::new();
    let (mut made, mut ended, mut changed) = (0, 0, 0);
    let rounds = times(6);
    for _ in 0..rounds {
        let (mut process, bad) = invite(&victim, role, fate);
        if let Some(mut bad) = bad {
            made += 1;
            victim.calls_beside(40, &mut bad);
            ended += usize::from(bad.has_ended());
            // The neighbour goes on after its connection has ended.
            (0..10).for_each(|_| victim.call(None));
            changed += usize::from(!victim.guards_are_whole(&bad));
        }
        (0..10).for_each(|_| victim.call(None));
        process.kill();
    }
    print(&format!(
        "{role}: {made} of {rounds} connections made, {ended} ended, {changed} changed memory that was not offered"
    ));
    (0..20).for_each(|_| victim.call(None));
    assert_eq!(changed, 0, "connections that changed memory that was not offered");
    match fate {
        Fate::Lives => assert_eq!(ended, 0, "connections of neighbours without harm ended"),
        Fate::Ends => assert_ne!(ended, 0, "no connection ended: the garbage did nothing"),
        Fate::Either | Fate::Refused(_) => {}
    }
}

/// Makes calls beside neighbours that offer memory of the wrong kind. This process maps none of it, and the
/// connection goes on. Of a stranger, it does not even take the descriptor.
fn offer(kind: &str, name: &str, reason: &str) {
    let mut victim = Victim::new();
    for _ in 0..times(6) {
        let (mut process, bad) = invite(&victim, &format!("swap {kind} large"), Fate::Ends);
        let mut bad = bad.unwrap();
        wait_until("the refusal of an offer", || {
            victim.call(Some(&mut bad));
            are_strangers() || Warnings::have(reason)
        });
        victim.calls_beside(40, &mut bad);
        assert!(!bad.has_ended(), "an offer that is refused ended the connection");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains(name), "mapped: {maps}");
        assert!(victim.guards_are_whole(&bad));
        process.kill();
    }
}

/// Stops a neighbour in the middle of its transfers, drops everything that it could use, and uses the memory
/// anew. Then the neighbour goes on.
fn stop() {
    let stops = std::env::var(STOPS).map_or(100, |stops| stops.parse().unwrap());
    let mut victim = Victim::new();
    let mut process = Process::start();
    let (mut costs, mut wrong, mut waited, mut waited_long) = (Vec::new(), 0, 0, 0);
    let mut before = Usage::now();
    for round in 0..times(stops) {
        let what = WORK[round % WORK.len()];
        let mut bad = victim.connect(&mut process, &format!("transfer {what}"));
        assert_eq!(process.hear().as_deref(), Some("ready"));
        // Some rounds keep the neighbour's receives and memory busy, too.
        if round % 3 == 0 {
            bad.serve();
        }
        nap(2000);
        victim.poll(Some(&mut bad));
        nap(500);
        process.stop();
        victim.call(Some(&mut bad));
        let mut cost = Cost::default();
        let memory = cost.count(|| bad.into_memory());
        let seed = round as u64;
        fill(&memory, seed);
        victim.call(None);
        process.resume();
        assert_eq!(process.hear().as_deref(), Some("ended"), "the neighbour's connection has ended");
        victim.call(None);
        wrong += usize::from(wrong_bytes(&memory, seed) > 0);
        waited += usize::from(cost.waits > 0);
        waited_long += usize::from(cost.waits > 0 && cost.time >= LONG_WAIT);
        costs.push(cost);
        if round == 5 {
            before = Usage::now();
        }
    }
    let longest = costs.iter().map(|cost| cost.cpu).max().unwrap_or_default();
    print(&format!(
        "stop: {} stops, {wrong} with wrong bytes, {waited} drops waited, {waited_long} for long, longest drop {longest:?} of processor time",
        costs.len()
    ));
    assert_eq!(wrong, 0, "stops after which memory was changed that had been taken back");
    assert!(longest < DROP, "dropping took {longest:?} of processor time: it waited for the peer");
    wait_for_the_rest(&mut victim, &before, &LEFT);
    // A drop may have to wait now and then, for the kernel or for a thread of this process that has no core:
    // but not for as long as for the peer, and not each time that the peer stopped at the same work.
    assert!(waited_long * 10 <= costs.len(), "{waited_long} of {} drops waited for long", costs.len());
    for (kind, what) in WORK.iter().enumerate() {
        let fewest = fewest_waits(costs.iter().skip(kind).step_by(WORK.len()));
        assert_eq!(fewest, 0, "each drop of a peer that stopped at {what} waited");
    }
    assert_eq!(fewest_waits(costs.iter().step_by(3)), 0, "each drop with requests under way waited");
}

fn fewest_waits<'a>(costs: impl Iterator<Item = &'a Cost>) -> u64 {
    costs.map(|cost| cost.waits).min().unwrap_or_default()
}

/// Counts the waits of calls that post, poll and drop, while the process of the neighbour is stopped, or its
/// service thread does not answer.
fn calls_return(kind: &str) {
    let mut victim = Victim::new();
    // The posts by target.
    let (mut posts, mut drops) = (vec![Vec::new(); TARGETS], Vec::new());
    let waits = |posts: &[Vec<Cost>], drops: &[Cost]| {
        let posts = posts.iter().map(|costs| fewest_waits(costs.iter())).max().unwrap_or_default();
        (posts, fewest_waits(drops.iter()))
    };
    for round in 0..times(ROUNDS) {
        if round >= times(3) && waits(&posts, &drops) == (0, 0) {
            break;
        }
        let mut process = Process::start();
        let mut bad = victim.connect(&mut process, &format!("target {kind}"));
        assert_eq!(process.hear().as_deref(), Some("ready"));
        if kind == "stopped" {
            process.stop();
        }
        // Each request uses a memory of the peer, and one of this process, for the first time.
        let sources: Vec<_> = (0..TARGETS).map(|_| fresh_region(&*victim.domain)).collect();
        let mut completions = [WorkCompletion::EMPTY; 16];
        let mut polled = Vec::new();
        for ((source, target), costs) in sources.iter().zip(&bad.targets[1..]).zip(&mut posts) {
            let mut cost = Cost::default();
            cost.count(|| {
                bad.end.write(1, segment(source, 0, LARGE), *target).unwrap();
                bad.end.read(2, segment(source, 0, LARGE), *target).unwrap();
                bad.end.send_inline(3, &[3; 64]).unwrap();
                for _ in 0..100 {
                    let count = victim.queue.poll(&mut completions);
                    polled.extend_from_slice(&completions[..count]);
                }
            });
            costs.push(cost);
        }
        // The call comes later, because it takes the completions of all queue pairs.
        if kind == "deaf" && round == 0 {
            let ours = bad.end.pair.number();
            wait_until("requests to a neighbour that polls", || {
                let count = victim.queue.poll(&mut completions);
                polled.extend_from_slice(&completions[..count]);
                polled.iter().filter(|done| done.queue_pair == ours && done.wr_id <= 3).count() >= 3 * TARGETS
            });
            let failed = polled.iter().filter(|done| done.status != CompletionStatus::Success).count();
            assert_eq!(failed, 0, "requests to a neighbour that polls failed");
        }
        victim.call(None);
        bad.serve();
        let mut cost = Cost::default();
        cost.count(|| drop((bad, sources)));
        drops.push(cost);
        victim.call(None);
    }
    print(&format!("{kind}: posts and polls {posts:?}, drops {drops:?}"));
    // A wait for the peer comes in each round.
    let (of_posts, of_drops) = waits(&posts, &drops);
    assert_eq!(of_posts, 0, "posts and polls waited for a peer that is {kind}");
    assert_eq!(of_drops, 0, "drops waited for a peer that is {kind}");
    let longest = drops.iter().map(|cost| cost.cpu).max().unwrap_or_default();
    assert!(longest < DROP, "dropping took {longest:?} of processor time");
}

/// Makes calls beside a neighbour that floods this process, until `call` returns that the flood was long
/// enough, and asserts that it holds no more than the bound, and nothing when the neighbour is gone.
fn within_bounds(
    victim: &mut Victim,
    process: &mut Process,
    (before, bound): (&Usage, &Usage),
    mut call: impl FnMut(&mut Victim) -> bool,
) {
    let mut most = *before;
    let begin = Instant::now();
    let shortest = Duration::from_secs(times(2) as u64);
    let mut enough = false;
    for round in 0.. {
        enough |= call(victim);
        if round % 5 == 0 {
            most = most.max(Usage::now());
        }
        if round > 100 && begin.elapsed() > shortest && enough {
            break;
        }
    }
    process.kill();
    print(&format!("before {before:?}, most {most:?}"));
    assert!(most.is_within(before, bound), "{most:?} is above {before:?} and {bound:?}");
}

fn wait_for_the_rest(victim: &mut Victim, before: &Usage, left: &Usage) {
    wait_until("what the neighbour left", || {
        victim.call(None);
        Usage::now().is_within(before, left)
    });
    print(&format!("after {:?}", Usage::now()));
}

fn warmed_up() -> (Victim, Usage) {
    let mut victim = Victim::new();
    let mut process = Process::start();
    let mut bad = victim.connect(&mut process, "flood");
    victim.calls_beside(20, &mut bad);
    drop((process, bad));
    victim.call(None);
    (victim, Usage::now())
}

fn flood_of_messages() {
    let (mut victim, before) = warmed_up();
    let mut process = Process::start();
    let mut bad = victim.connect(&mut process, "flood");
    within_bounds(&mut victim, &mut process, (&before, &BOUND), |victim| {
        victim.call(Some(&mut bad));
        bad.received() > 100
    });
    drop(bad);
    wait_for_the_rest(&mut victim, &before, &LEFT);
}

fn flood_of_segments() {
    let (mut victim, before) = warmed_up();
    let mut process = Process::start();
    let mut bad = victim.connect(&mut process, &format!("segments {MEMORIES}"));
    within_bounds(&mut victim, &mut process, (&before, &BOUND), |victim| {
        for _ in 0..20 {
            victim.poll(Some(&mut bad));
            bad.serve();
        }
        victim.call(Some(&mut bad));
        assert!(!bad.has_ended(), "a flood of memories ended the connection");
        bad.read_by_name() == MEMORIES
    });
    print(&format!(
        "{} messages from memories of their own, {} of them read",
        bad.received(),
        bad.read_by_name()
    ));
    drop(bad);
    wait_for_the_rest(&mut victim, &before, &LEFT);
}

/// Makes calls beside a neighbour that makes very many connections to the device.
fn flood_of_sockets(role: &str) {
    let (mut victim, before) = warmed_up();
    let mut process = Process::start();
    let names = hostile::listening_sockets(std::process::id());
    assert!(!names.is_empty(), "the device listens on no unix socket");
    process.tell(&format!("{role} {}", names.join(" ")));
    assert_eq!(process.hear().as_deref(), Some("ready"));
    // Before Linux 6.16 the kernel passes descriptors to the device, and those that linger wait to be closed.
    let refuses = kernel_refuses_descriptors();
    let bound = Usage { descriptors: BOUND.descriptors + if refuses { 0 } else { KNOCKS }, ..BOUND };
    let mut round = 0;
    within_bounds(&mut victim, &mut process, (&before, &bound), |victim| {
        victim.call(None);
        round += 1;
        if round % 50 == 0 {
            // An honest process can still connect.
            let (_honest, mut end) = connect_honest(victim);
            wait_until("a message of a process that connected beside the flood", || {
                victim.call(Some(&mut end));
                end.received() > 0
            });
            assert!(!end.has_ended());
        }
        true
    });
    let counted = std::iter::from_fn(|| process.hear()).last().unwrap();
    let counts: Vec<usize> = counted.split(' ').filter_map(|word| word.parse().ok()).collect();
    print(&format!("messages with descriptors that were sent, and refused by the kernel: {counts:?}"));
    assert_eq!(counts.iter().map(|&count| count > 0).collect::<Vec<_>>(), [!refuses, refuses]);
    wait_for_the_rest(&mut victim, &before, &LEFT);
}

/// Returns whether the kernel knows `SO_PASSRIGHTS`, by which a device refuses descriptors: from Linux 6.16
/// on.
fn kernel_refuses_descriptors() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers =
        release.split(|letter: char| !letter.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(16))
}

/// Connects to a new honest process that sends messages. On a busy machine the answer of one of the two
/// devices may come too late; then another process takes its place.
fn connect_honest(victim: &Victim) -> (Process, Bad) {
    const TRIES: usize = 10;
    for _ in 0..TRIES {
        let mut honest = Process::start_honest();
        let end = victim.connect(&mut honest, "transfer messages");
        if honest.hear().as_deref() == Some("ready") {
            return (honest, end);
        }
    }
    panic!("{TRIES} honest processes could not connect beside the flood");
}

/// Makes calls to an honest neighbour that forks without exec. Its forked children use and drop their copies
/// of its objects.
fn fork() {
    let mut victim = Victim::beside("forks", Process::start);
    (0..times(100)).for_each(|_| victim.call(None));
}

/// Drops connections of neighbours that died while a child that they had forked lives on, with copies of all
/// their sockets and mappings. As with TCP, such a connection may look alive. Dropping it does not wait, and
/// leaves only sockets that the child still holds.
fn fork_that_outlives_its_parent() {
    let (mut victim, before) = warmed_up();
    let mut cost = Cost::default();
    let count = times(5);
    for _ in 0..count {
        let mut process = Process::start();
        let mut bad = victim.connect(&mut process, "leaves-fork");
        assert_eq!(process.hear().as_deref(), Some("ready"));
        victim.calls_beside(20, &mut bad);
        cost.count(|| drop(bad));
        victim.call(None);
    }
    print(&format!("dropped beside forked children: {cost:?}"));
    assert!(cost.cpu < DROP, "dropping took {:?} of processor time", cost.cpu);
    wait_for_the_rest(&mut victim, &before, &Usage { descriptors: 4 * count, ..LEFT });
}

/// Makes calls beside a neighbour that looks for memory of this process in all that it can read.
fn peek() {
    let mut victim = Victim::new();
    for _ in 0..times(3) {
        let mut process = Process::start();
        let mut bad = victim.connect(&mut process, "peek");
        let view = bad.end.pair.local().unwrap().view(bad.targets[0], 8);
        let refused = view.unwrap_err().kind();
        assert_eq!(refused, VerbsErrorKind::Unsupported, "a view of another user's memory");
        (0..100).for_each(|_| victim.call(Some(&mut bad)));
        let seen = process.hear();
        print(&format!("pages seen: {seen:?}"));
        assert_eq!(seen.as_deref(), Some("0"), "pages with memory that was not offered");
        assert_eq!(process.hear().as_deref(), Some(""), "what the device gave to a stranger");
    }
}

/// Kills neighbours at random instants.
fn die() {
    let (mut victim, before) = warmed_up();
    for round in 0..times(30) {
        let mut process = Process::start();
        let what = ["writes", "sends", "reads", "all"][round % 4];
        let mut bad = victim.connect(&mut process, &format!("transfer {what}"));
        bad.serve();
        nap(3000);
        process.kill();
        wait_until("the end of a connection whose peer was killed", || {
            victim.call(Some(&mut bad));
            bad.has_ended()
        });
        assert!(victim.guards_are_whole(&bad));
    }
    wait_for_the_rest(&mut victim, &before, &LEFT);
}
