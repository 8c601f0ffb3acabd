//! Byte streams whose connections have a completion queue each, polled by hand.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Wake, Waker};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpListener;
use tokio::task::coop::unconstrained;
use tokio_stream::StreamExt as _;

use support::within;

use super::*;
use crate::endpoint::negotiate::{Dialer, Listener};
use crate::endpoint::{EndpointStream, Verdict};

const LENGTH: usize = 64;
const MESSAGE: [u8; LENGTH] = [7; LENGTH];
const ROUNDS: usize = 50;

/// A task that counts how often it is woken, and is never run.
#[derive(Debug, Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Task {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn woken(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Returns what this task reads, if anything has arrived.
    fn reads(self: &Arc<Self>, stream: &mut EndpointStream) -> Option<Vec<u8>> {
        let (waker, mut bytes) = (Waker::from(Arc::clone(self)), [0; 64 << 10]);
        let mut buffer = ReadBuf::new(&mut bytes);
        match AsyncRead::poll_read(Pin::new(stream), &mut TaskContext::from_waker(&waker), &mut buffer) {
            Poll::Ready(read) => {
                read.unwrap();
                Some(buffer.filled().to_vec())
            }
            Poll::Pending => None,
        }
    }

    /// As [`reads`](Self::reads), if this task was woken since `seen`, as the runtime does.
    fn reads_when_woken(self: &Arc<Self>, stream: &mut EndpointStream, seen: &mut usize) -> Option<Vec<u8>> {
        let woken = self.woken();
        if std::mem::replace(seen, woken) == woken { None } else { self.reads(stream) }
    }

    /// Returns how many of the bytes this task writes, if there is room.
    fn writes(self: &Arc<Self>, stream: &mut EndpointStream, bytes: &[u8]) -> Option<usize> {
        let waker = Waker::from(Arc::clone(self));
        let mut context = TaskContext::from_waker(&waker);
        match AsyncWrite::poll_write(Pin::new(stream), &mut context, bytes) {
            Poll::Ready(written) => Some(written.unwrap()),
            Poll::Pending => None,
        }
    }

    /// Writes a message, and flushes it. The flush may be pending although credits have come: the poll task may take
    /// them after the flush has found none, and then wakes this task.
    fn sends(self: &Arc<Self>, stream: &mut EndpointStream) {
        until(|| self.writes(stream, &MESSAGE).inspect(|&count| assert_eq!(count, LENGTH)).is_some());
        let waker = Waker::from(Arc::clone(self));
        until(|| {
            let flushed = AsyncWrite::poll_flush(Pin::new(stream), &mut TaskContext::from_waker(&waker));
            flushed.map(Result::unwrap).is_ready()
        });
    }
}

/// Settings with which nothing spins, and nothing pings during a test.
fn config() -> Config {
    const NEVER: Duration = Duration::from_secs(3600);
    let config = Config::default().spin_limit(Duration::ZERO).handshake_timeout(Duration::from_secs(60));
    config.ping_interval(NEVER).ping_timeout(NEVER)
}

/// Makes connections, and returns both ends of each.
async fn pairs(config: &Config, count: usize) -> Vec<(EndpointStream, EndpointStream)> {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut listener = Listener::new(socket, config.clone()).unwrap();
    let (port, mut pairs) = (listener.local_addr().port(), Vec::new());
    for _ in 0..count {
        let dialer = Dialer::new(config.clone());
        let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
        let (client, server) = (client.unwrap(), server.unwrap());
        assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
        pairs.push((client, server));
    }
    pairs
}

async fn pair(config: &Config) -> (EndpointStream, EndpointStream) {
    pairs(config, 1).await.remove(0)
}

/// Waits until `condition` returns true. The thread of the test is none of the runtime's workers. It comes back
/// soon, because the device's thread checks messages that no task takes for some milliseconds.
fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing happens");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Returns the reactor of the current runtime, which has one.
fn reactor() -> Arc<Reactor> {
    let (_, reactors) = REACTORS.of_runtime(Handle::current().id());
    let reactors: Vec<_> = reactors.iter().filter_map(Weak::upgrade).collect();
    let [reactor] = &reactors[..] else { panic!("one way of polling, but {} reactors", reactors.len()) };
    Arc::clone(reactor)
}

impl Reactor {
    fn own_queues(&self) -> usize {
        self.own.all().len()
    }

    /// Returns how often the poll task has polled the queues that connections share.
    fn polls(&self) -> u64 {
        self.queues.iter().map(|queue| queue.polling.polls.value()).sum()
    }
}

fn run(runtime: &mut Builder, test: impl Future<Output = ()>) {
    // A poll by hand is to wait for arrivals only, and not for the turn of the test's own task.
    runtime.enable_all().build().unwrap().block_on(unconstrained(within(test)));
}

/// Runs `test` in a runtime with two workers.
fn with_workers(test: impl Future<Output = ()>) {
    run(Builder::new_multi_thread().worker_threads(2), test);
}

/// The runtime's driver wakes the waiting task itself: the poll task does not run, and the waiting task polls
/// once when it runs, and twice before it waits again. If this test gets no core for some milliseconds, the
/// device wakes the task once more. So not all rounds have to be as they should.
#[test]
fn an_arrival_wakes_the_task_that_waits_for_it_and_no_other() {
    with_workers(async {
        let (mut client, mut server) = pair(&config()).await;
        let (reactor, reader, writer) = (reactor(), Task::new(), Task::new());
        assert_eq!(reactor.own_queues(), 2);
        let shared = reactor.polls();
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let (woken, before) = (reader.woken(), server.info().counters());
            // A second wait without an arrival changes nothing.
            assert_eq!([reader.reads(&mut server), reader.reads(&mut server)], [None, None]);
            writer.sends(&mut client);
            let mut seen = woken;
            until(|| reader.reads_when_woken(&mut server, &mut seen).is_some());
            let now = server.info().counters();
            rounds.push((reader.woken() - woken, now.polls - before.polls, now.sleeps - before.sleeps));
        }
        let alike = rounds.iter().filter(|&&round| round == (1, 3, 1)).count();
        assert!(alike >= ROUNDS / 2, "wakes of the reader, polls, and sleeps: {rounds:?}");
        assert_eq!(writer.woken(), 0);
        assert_eq!(reactor.polls(), shared, "the poll task has run");
    });
}

/// The poll task begins to spin for a connection at the moment in which its task begins to wait. Afterwards an
/// arrival wakes the task, also when nothing spins any more.
#[test]
fn no_arrival_is_lost_when_a_spin_and_a_wait_begin_together() {
    const ROUNDS: usize = 4000;
    with_workers(async {
        let (mut client, mut server) = pair(&config().spin_limit(Duration::from_millis(1))).await;
        let own = Arc::clone(server.own_queue().unwrap());
        let (writer, reader) = (Task::new(), Task::new());
        let rounds: Arc<[AtomicUsize; 2]> = Arc::default();
        let theirs = Arc::clone(&rounds);
        std::thread::spawn(move || {
            for round in 1..=ROUNDS {
                while theirs[0].load(Ordering::SeqCst) < round {
                    std::hint::spin_loop();
                }
                // The two meet at another point in each round.
                (0..round % 64).for_each(|_| std::hint::spin_loop());
                own.spin();
                theirs[1].store(round, Ordering::SeqCst);
            }
        });
        for round in 1..=ROUNDS {
            for spins in [true, false] {
                let mut seen = reader.woken();
                if spins {
                    rounds[0].store(round, Ordering::SeqCst);
                }
                assert_eq!(reader.reads(&mut server), None);
                writer.sends(&mut client);
                until(|| reader.woken() != seen);
                until(|| reader.reads_when_woken(&mut server, &mut seen).is_some());
                until(|| rounds[1].load(Ordering::SeqCst) == round);
            }
        }
    });
}

/// A task that has sent something, and waits for the answer, wakes no other task unless the settings allow
/// spins.
fn check_that_nothing_spins_for_an_answer(config: Config) {
    with_workers(async {
        let (mut client, mut server) = pair(&config).await;
        let (reactor, caller, callee) = (reactor(), Task::new(), Task::new());
        let shared = reactor.polls();
        for _ in 0..ROUNDS {
            // Before they wait.
            let (mut caller_seen, mut callee_seen) = (caller.woken(), callee.woken());
            assert_eq!(callee.reads(&mut server), None);
            caller.sends(&mut client);
            assert_eq!(caller.reads(&mut client), None);
            until(|| callee.reads_when_woken(&mut server, &mut callee_seen).is_some());
            callee.sends(&mut server);
            until(|| caller.reads_when_woken(&mut client, &mut caller_seen).is_some());
        }
        assert_eq!(reactor.polls(), shared, "the poll task has run");
    });
}

#[test]
fn nothing_spins_for_an_answer_if_the_limit_is_zero() {
    check_that_nothing_spins_for_an_answer(config());
}

#[test]
fn nothing_spins_for_an_answer_in_event_mode() {
    let longest = Config::default().spin_limit;
    check_that_nothing_spins_for_an_answer(config().poll_mode(PollMode::Event).spin_limit(longest));
}

/// Acknowledgements wake the reader, which finds nothing to read. The next message wakes it again.
#[test]
fn what_arrives_without_bytes_costs_no_later_wake_up() {
    with_workers(async {
        let (mut client, mut server) = pair(&config()).await;
        let (reader, other) = (Task::new(), Task::new());
        for _ in 0..ROUNDS {
            let (acknowledged, before) = (server.info().counters().acks_sent, reader.woken());
            assert_eq!(reader.reads(&mut client), None);
            while server.info().counters().acks_sent == acknowledged {
                other.sends(&mut client);
                until(|| other.reads(&mut server).is_some());
            }
            until(|| reader.woken() > before);
            let mut seen = reader.woken();
            assert_eq!(reader.reads(&mut client), None);
            other.sends(&mut server);
            until(|| reader.reads_when_woken(&mut client, &mut seen).is_some());
        }
    });
}

/// The supervisors send pings all the time, and the thread that polls answers them.
#[test]
fn pings_cost_no_later_wake_up() {
    let config = config().ping_interval(Duration::from_millis(1));
    with_workers(async {
        let (mut client, mut server) = pair(&config).await;
        let (reader, writer) = (Task::new(), Task::new());
        for _ in 0..ROUNDS {
            let (pinged, mut seen) = (server.info().counters().acks_sent, reader.woken());
            assert_eq!(reader.reads(&mut server), None);
            until(|| {
                assert_eq!(reader.reads_when_woken(&mut server, &mut seen), None);
                server.info().counters().acks_sent > pinged
            });
            writer.sends(&mut client);
            until(|| reader.reads_when_woken(&mut server, &mut seen).is_some());
        }
    });
}

/// The event wakes a task that does not read any more. So the supervisor takes what has arrived.
#[test]
fn an_arrival_for_a_task_that_waits_no_more_is_taken_all_the_same() {
    with_workers(async {
        let (mut client, mut server) = pair(&config()).await;
        let (stale, reader, writer) = (Task::new(), Task::new(), Task::new());
        assert_eq!(stale.reads(&mut server), None);
        let received = server.info().counters().eager_received;
        writer.sends(&mut client);
        until(|| server.info().counters().eager_received > received);
        assert!(stale.woken() > 0);
        assert_eq!(reader.reads(&mut server).unwrap(), MESSAGE);
        // Another task reads from here on: an arrival wakes it, too.
        assert_eq!([stale.reads(&mut server), reader.reads(&mut server)], [None, None]);
        writer.sends(&mut client);
        let mut seen = 0;
        until(|| reader.reads_when_woken(&mut server, &mut seen).is_some());
    });
}

/// A writer waits for room, and a reader of another task for bytes. Whichever of them polls does so for both.
#[test]
fn a_reader_and_a_writer_wait_in_two_tasks() {
    with_workers(async {
        let (mut client, mut server) = pair(&config()).await;
        let (reader, writer, other) = (Task::new(), Task::new(), Task::new());
        let part = [7; 16 << 10];
        for polls_first in [&reader, &writer] {
            let (mut sent, mut before) = (0, writer.woken());
            while let Some(count) = writer.writes(&mut client, &part) {
                (sent, before) = (sent + count, writer.woken());
            }
            let mut seen = reader.woken();
            assert_eq!(reader.reads(&mut client), None);
            let mut received = 0;
            until(|| {
                received += other.reads(&mut server).map_or(0, |bytes| bytes.len());
                received == sent
            });
            other.sends(&mut server);
            if Arc::ptr_eq(polls_first, &reader) {
                until(|| reader.reads_when_woken(&mut client, &mut seen).is_some());
                until(|| writer.woken() > before);
                assert!(writer.writes(&mut client, &MESSAGE).is_some());
            } else {
                until(|| writer.woken() > before && writer.writes(&mut client, &MESSAGE).is_some());
                until(|| reader.reads_when_woken(&mut client, &mut seen).is_some());
            }
            // The last write may have been gathered.
            assert_eq!(reader.reads(&mut client), None);
            until(|| other.reads(&mut server).is_some());
        }
    });
}

#[test]
fn both_directions_of_a_stream_in_two_tasks() {
    const ALL: usize = 8 << 20;
    with_workers(async {
        let (client, server) = pair(&config()).await;
        let tasks = [client, server].map(|stream| {
            let (mut reading, mut writing) = tokio::io::split(stream);
            let write = tokio::spawn(async move {
                for part in vec![7; ALL].chunks(10_000) {
                    writing.write_all(part).await.unwrap();
                }
                writing.shutdown().await.unwrap();
            });
            let read = tokio::spawn(async move {
                let mut all = Vec::new();
                reading.read_to_end(&mut all).await.unwrap();
                assert_eq!(all.len(), ALL);
            });
            [write, read]
        });
        for task in tasks.into_iter().flatten() {
            task.await.unwrap();
        }
    });
}

/// The supervisor sends the rest, and takes what still arrives. No task that has read the stream before is
/// woken for that.
#[test]
fn a_dropped_stream_is_finished_by_its_supervisor() {
    with_workers(async {
        let (mut client, mut server) = pair(&config()).await;
        let (reactor, stale, other) = (reactor(), Task::new(), Task::new());
        assert_eq!(stale.reads(&mut client), None);
        let (mut sent, mut received) = (0, 0);
        for _ in 0..10 {
            sent += stale.writes(&mut client, &[7; 1000]).unwrap();
        }
        drop(client);
        until(|| match other.reads(&mut server) {
            Some(bytes) if bytes.is_empty() => true,
            bytes => {
                received += bytes.map_or(0, |bytes| bytes.len());
                false
            }
        });
        assert_eq!(received, sent);
        drop(server);
        until(|| reactor.own_queues() == 0);
        assert_eq!(stale.woken(), 0, "a task that has dropped the stream was woken");
    });
}

#[test]
fn connections_beyond_the_limit_share_a_queue() {
    with_workers(async {
        let mut pairs = pairs(&config(), OwnQueues::MOST / 2 + 4).await;
        let (reactor, reader, writer) = (reactor(), Task::new(), Task::new());
        assert_eq!(reactor.own_queues(), OwnQueues::MOST);
        for (client, server) in &mut pairs {
            for _ in 0..2 {
                let mut seen = reader.woken();
                assert_eq!(reader.reads(server), None);
                writer.sends(client);
                until(|| reader.reads_when_woken(server, &mut seen).is_some());
                std::mem::swap(client, server);
            }
        }
        assert_eq!(writer.woken(), 0);
        // The queues of connections that have ended are for others.
        pairs.drain(..3);
        until(|| reactor.own_queues() == OwnQueues::MOST - 6);
        let fresh = self::pairs(&config(), 4).await;
        assert_eq!(reactor.own_queues(), OwnQueues::MOST);
        drop((pairs, fresh));
        until(|| reactor.own_queues() == 0);
    });
}

/// Where something polls anyway, or the poll task is on the only thread, connections share a queue.
#[test]
fn only_runtimes_with_workers_that_poll_nothing_have_queues_of_connections() {
    let own_queues = |runtime: &mut Builder, config: Config, expected| {
        run(runtime, async {
            let (mut client, mut server) = pair(&config).await;
            assert_eq!(reactor().own_queues(), expected, "{:?}", config.poll_mode);
            client.write_all(&MESSAGE).await.unwrap();
            client.flush().await.unwrap();
            let mut received = [0; LENGTH];
            server.read_exact(&mut received).await.unwrap();
            assert_eq!(received, MESSAGE);
        });
    };
    for mode in [PollMode::Adaptive, PollMode::Event] {
        own_queues(Builder::new_multi_thread().worker_threads(2), config().poll_mode(mode), 2);
        own_queues(Builder::new_multi_thread().worker_threads(1), config().poll_mode(mode), 0);
        own_queues(&mut Builder::new_current_thread(), config().poll_mode(mode), 0);
        own_queues(idle_polling(&mut Builder::new_current_thread()), config().poll_mode(mode), 0);
    }
    own_queues(Builder::new_multi_thread().worker_threads(2), config().poll_mode(PollMode::Busy), 0);
}
