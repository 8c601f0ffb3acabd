//! Counts the threads that wake for a call when both ends sleep (`wake_ups.rs`), and the allocations and system
//! calls for each small message on a warm connection when both ends poll. When both ends poll, there is no
//! allocation, and no system call of ours, and the counts are of one thread each. No test asserts a time.
//!
//! These tests have a process of their own, because they replace the global allocator and install seccomp
//! filters.
//!
//! tokio's own calls are counted separately: a current-thread runtime looks at its I/O driver (an
//! `epoll_wait` that does not wait) each time it has run out of tasks, also when `on_thread_park` has just
//! woken one, and after every 61 tasks. With one message under way at a time, that is one such call for each
//! message at each end, and the only call.
//!
//! Calls caused by time are counted separately too: each millisecond the poll task sets a timer, for which
//! tokio's timer may wake its driver. So a test allows the calls that its time and its sleeps explain, and no
//! more. A slow machine takes more time for the same messages, and is allowed more calls. An end sleeps while
//! other processes want its core; each sleep costs calls.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod system_calls;
mod wake_ups;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt;
use tonic_rdma::{Config, Dialer, EndpointStream, PollMode, Verdict};

use support::{Counting, Runtime, allocations_of_this_thread};
use system_calls::{EPOLL, NotPermitted, SystemCalls, WHILE_WAITING, describe};

#[global_allocator]
static COUNTING: Counting = Counting;

const WARM_UP: usize = 2_000;
const MESSAGES: usize = 10_000;
const LENGTH: usize = 64;

/// System calls that one sleep of an end costs at both ends.
const CALLS_OF_A_SLEEP: u64 = 4;
/// System calls of a millisecond: the poll task's timer and a wake-up of tokio's driver, at each end.
const CALLS_OF_A_MILLISECOND: u64 = 4;

/// The lock of tests that spin, which must not run at one time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The allocations and system calls of a thread.
#[derive(Debug)]
struct Counts {
    allocations: u64,
    calls: BTreeMap<i64, u64>,
    elapsed: Duration,
}

impl Counts {
    fn all_calls(&self) -> u64 {
        self.calls.values().sum()
    }

    /// Returns the calls that the time explains.
    fn explained_by_time(&self) -> u64 {
        CALLS_OF_A_MILLISECOND * self.elapsed.as_millis() as u64
    }
}

#[test]
fn allocations_are_counted() {
    let before = allocations_of_this_thread();
    let mut vector = std::hint::black_box(vec![1_u8; 100]);
    vector.reserve(100_000);
    drop(std::hint::black_box(vector));
    assert_eq!(allocations_of_this_thread() - before, 2);
}

/// Runs both ends in one runtime, so that the waits do not depend on the system's scheduler.
#[test]
fn round_trips_in_one_runtime() {
    let _alone = alone();
    let (counts, sleeps) = in_one_runtime(|mut client, server| async move {
        tokio::spawn(echo(server));
        round_trips(&mut client, WARM_UP).await;
        with_sleeps(&mut client, async |client, count| round_trips(client, count).await).await
    });
    check("one runtime, round trips", counts, sleeps + 1);
}

/// Sends messages in one direction only. Acknowledgements go back.
#[test]
fn one_way_in_one_runtime() {
    let _alone = alone();
    let (counts, sleeps) = in_one_runtime(|mut client, server| async move {
        tokio::spawn(read(server));
        write(&mut client, WARM_UP).await;
        with_sleeps(&mut client, async |client, count| write(client, count).await).await
    });
    check("one runtime, one way", counts, sleeps + 1);
}

/// Each end spins on its own thread. If the system preempts a thread, its peer goes to sleep, and a sleep
/// costs calls at both ends (one end writes the event descriptor, and the other end reads it). So each call
/// must belong to a sleep. The test needs free cores.
#[test]
fn round_trips_between_two_threads() {
    /// Wake-ups of tokio's driver by its timer: for each millisecond at each end, because the poll task sets
    /// a timer to check whether another thread polls.
    const OTHERS: u64 = 100;
    const ENDS: u64 = 2;
    let _alone = alone();
    if thread::available_parallelism().map_or(1, usize::from) < 2 {
        println!("skipped: one core can't have both ends polling");
        return;
    }
    let start = Instant::now();
    let [(client, slept), (server, server_slept)] = between_two_threads();
    let others = OTHERS + ENDS * start.elapsed().as_millis() as u64;
    let (Ok(client), Ok(server)) = (client, server) else { return };
    let (calls, sleeps) = (client.all_calls() + server.all_calls(), slept + server_slept);
    println!("two threads: {MESSAGES} round trips, {calls} calls, {sleeps} sleeps");
    if sleeps > MESSAGES as u64 / 10 {
        println!("skipped: the machine has too much else to do for both ends to poll");
        return;
    }
    assert!(calls <= CALLS_OF_A_SLEEP * sleeps + others, "{calls} calls, and {sleeps} sleeps");
}

type Counted = Result<Counts, NotPermitted>;

/// The counts of the client and of the server, with the sleeps of each.
fn between_two_threads() -> [(Counted, u64); 2] {
    let (sender, receiver) = mpsc::channel();
    let server = thread::spawn(move || {
        Runtime::Idle.run(async {
            let mut listener = support::listen(config()).await;
            sender.send(listener.local_addr().port()).unwrap();
            let mut stream = listener.next().await.unwrap();
            answers(&mut stream, WARM_UP).await;
            with_sleeps(&mut stream, async |stream, count| answers(stream, count).await).await
        })
    });
    let client = thread::spawn(move || {
        Runtime::Idle.run(async {
            let mut stream = Dialer::new(config()).dial("127.0.0.1", receiver.recv().unwrap()).await.unwrap();
            assert_eq!(stream.info().verdict(), Verdict::Rdma, "{}", stream.info().reason());
            round_trips(&mut stream, WARM_UP).await;
            with_sleeps(&mut stream, async |stream, count| round_trips(stream, count).await).await
        })
    });
    [client.join().unwrap(), server.join().unwrap()]
}

/// Returns the counts of `messages`, and how often the end slept meanwhile. Two ends in one runtime share the
/// count. A sleep that has begun before is not counted.
async fn with_sleeps(
    stream: &mut EndpointStream,
    mut messages: impl AsyncFnMut(&mut EndpointStream, usize),
) -> (Counted, u64) {
    let before = stream.info().counters().sleeps;
    let counts = counted(WHILE_WAITING, async |count| messages(stream, count).await).await;
    (counts, stream.info().counters().sleeps - before)
}

/// Counts tokio's looks at its driver: one for each message, at the end that waits for the message.
#[test]
fn tokio_looks_at_its_driver_once_for_each_message() {
    let _alone = alone();
    const MESSAGES_OF_BOTH: u64 = 2 * MESSAGES as u64;
    let counts = in_one_runtime(|mut client, server| async move {
        tokio::spawn(echo(server));
        round_trips(&mut client, WARM_UP).await;
        counted(&[], async |count| round_trips(&mut client, count).await).await
    });
    let Ok(counts) = counts else { return };
    let looks: u64 = EPOLL.iter().filter_map(|call| counts.calls.get(call)).sum();
    println!(
        "{MESSAGES_OF_BOTH} messages between two tasks in {:?}: {looks} looks at tokio's driver",
        counts.elapsed
    );
    let explained = MESSAGES_OF_BOTH * 3 / 2 + counts.explained_by_time();
    assert!(
        looks <= explained,
        "{looks} looks at the driver for {MESSAGES_OF_BOTH} messages in {:?}",
        counts.elapsed
    );
}

/// Checks that the time and the sleeps explain all calls, and that almost nothing was allocated.
fn check(what: &str, counts: Counted, sleeps: u64) {
    /// Calls of unfinished milliseconds, and of a short preemption of a thread.
    const OTHERS: u64 = 20;
    let Ok(counts) = counts else { return };
    let found = format!(
        "{what}: {MESSAGES} messages in {:?}, {sleeps} sleeps, {}",
        counts.elapsed,
        describe(&counts.calls)
    );
    println!("{found}");
    assert!(counts.all_calls() <= OTHERS + counts.explained_by_time() + CALLS_OF_A_SLEEP * sleeps, "{found}");
    // A queue may grow once, when the other end is preempted.
    assert!(counts.allocations < 16, "{found}, {} allocations", counts.allocations);
}

/// Runs `messages`. Counts the allocations of the calling thread, and its system calls except `uncounted`.
async fn counted(uncounted: &[i64], mut messages: impl AsyncFnMut(usize)) -> Counted {
    let calls = SystemCalls::count_but(uncounted);
    let (before, start) = (allocations_of_this_thread(), Instant::now());
    // The other end expects the messages, even if this end can't count calls.
    messages(MESSAGES).await;
    let (elapsed, allocations) = (start.elapsed(), allocations_of_this_thread() - before);
    Ok(Counts { allocations, calls: calls?.so_far(), elapsed })
}

/// Runs `test` on its own thread and runtime, with both ends of a connection.
fn in_one_runtime<T: Send + 'static, F: Future<Output = T>>(
    test: impl FnOnce(EndpointStream, EndpointStream) -> F + Send + 'static,
) -> T {
    let body = move || {
        Runtime::Idle.run(async {
            let (client, server) = support::pair(config()).await;
            test(client, server).await
        })
    };
    thread::spawn(body).join().unwrap()
}

/// Returns settings that poll without sleeping. A sleeping end would cost the other end a system call.
fn config() -> Config {
    support::config().poll_mode(PollMode::Adaptive).spin_limit(Duration::from_secs(1))
}

async fn round_trips(stream: &mut EndpointStream, count: usize) {
    let mut message = [0; LENGTH];
    for number in 0..count {
        let sent = [number as u8; LENGTH];
        stream.write_all(&sent).await.unwrap();
        stream.flush().await.unwrap();
        stream.read_exact(&mut message).await.unwrap();
        assert_eq!(message, sent);
    }
}

async fn answers(stream: &mut EndpointStream, count: usize) {
    let mut message = [0; LENGTH];
    for _ in 0..count {
        stream.read_exact(&mut message).await.unwrap();
        stream.write_all(&message).await.unwrap();
        stream.flush().await.unwrap();
    }
}

async fn echo(mut stream: EndpointStream) {
    answers(&mut stream, WARM_UP + MESSAGES).await;
}

async fn write(stream: &mut EndpointStream, count: usize) {
    for number in 0..count {
        stream.write_all(&[number as u8; LENGTH]).await.unwrap();
        stream.flush().await.unwrap();
    }
}

async fn read(mut stream: EndpointStream) {
    let mut message = [0; LENGTH];
    for _ in 0..WARM_UP + MESSAGES {
        stream.read_exact(&mut message).await.unwrap();
    }
}

mod child {
    /// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
    #[test]
    fn role() {
        if let Ok(role) = std::env::var(support::ROLE) {
            super::wake_ups::play(&role);
        }
    }
}
