//! Callers that poll the queue themselves, and work that a poll runs.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use std::io::IoSlice;

use super::side::{TIMEOUT, endpoints, settings};
use crate::endpoint::config::Config;
use crate::endpoint::messages::{LandedContent, MessageEndpoint, MessageHandler, Sender, Wire as _};
use crate::endpoint::{ConnectionFault, Deferred, Run};

/// Answers each message by itself: at the server from a run, at the client by waking the waiting tasks.
#[derive(Debug, Default)]
struct Echo {
    queue: Vec<Bytes>,
    arrived: usize,
    wakers: Vec<Waker>,
    /// The endpoint of the server.
    served_by: Weak<MessageEndpoint>,
    after: Deferred,
}

#[derive(Debug)]
struct Answer(Arc<MessageEndpoint>);

impl Run for Answer {
    /// Sends, which takes the connection's lock: it must be free here.
    fn run(self: Arc<Self>) {
        self.0.drive();
    }
}

impl MessageHandler for Echo {
    fn receive(&mut self, message: Bytes) -> Result<bool, ConnectionFault> {
        self.arrived += 1;
        if let Some(endpoint) = self.served_by.upgrade() {
            self.queue.push(message);
            self.after.runs.push(Arc::new(Answer(endpoint)));
        }
        self.after.wakers.append(&mut self.wakers);
        Ok(true)
    }

    fn landed(&mut self, _: u64, _: Option<LandedContent>) {}

    fn transmit(&mut self, sender: &mut Sender<'_>) -> Result<(), ConnectionFault> {
        while sender.room() > 0
            && let Some(message) = self.queue.pop()
        {
            sender.send(&[IoSlice::new(&message)])?;
        }
        Ok(())
    }

    fn peer_finished(&mut self) {}

    fn ended(&mut self, _: &ConnectionFault) {
        self.after.wakers.append(&mut self.wakers);
    }

    fn after(&mut self) -> &mut Deferred {
        &mut self.after
    }
}

/// Sends a message.
fn send(endpoint: &MessageEndpoint, message: &'static [u8]) {
    endpoint.update(|echo: &mut Echo| (echo.queue.push(Bytes::from_static(message)), true));
}

/// Returns whether `count` messages have arrived. If not, the task of `waker` is woken by the next one.
fn have_arrived(endpoint: &MessageEndpoint, count: usize, waker: Option<&Waker>) -> bool {
    endpoint.update(|echo: &mut Echo| {
        echo.wakers.extend(waker.cloned());
        (echo.arrived >= count, false)
    })
}

struct World {
    client: MessageEndpoint,
    server: Arc<MessageEndpoint>,
}

impl World {
    async fn new() -> Self {
        let (client, server) = endpoints(&Config::default()).await;
        let server = Arc::new(server);
        client.start(Echo::default(), &settings());
        server.start(Echo { served_by: Arc::downgrade(&server), ..Echo::default() }, &settings());
        Self { client, server }
    }

    /// Sends a message, and waits until `count` answers have come, as a call's future does.
    async fn call(&self, count: usize) {
        let (_under_way, begun) = (self.client.begin_call(), Instant::now());
        send(&self.client, b"ping");
        let mut polls = 0;
        poll_fn(|context: &mut Context<'_>| {
            polls += 1;
            if polls > 1 && self.client.spin(Some(begun), || have_arrived(&self.client, count, None)) {
                return Poll::Ready(());
            }
            if polls == 1 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if have_arrived(&self.client, count, Some(context.waker())) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.client.close();
        self.server.close();
    }
}

/// Calls one after the other, with pauses in which all pollers fall asleep. No wake-up is lost.
async fn calls_with_pauses() {
    let world = World::new().await;
    let calls = async {
        for count in 1..=600 {
            world.call(count).await;
            if count % 100 == 0 {
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, calls).await.expect("a wake-up was lost");
}

#[tokio::test]
async fn calls_with_pauses_in_a_runtime_of_one_thread() {
    calls_with_pauses().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_with_pauses_in_a_runtime_of_two_workers() {
    calls_with_pauses().await;
}

#[test]
fn calls_with_pauses_in_a_runtime_that_polls_when_idle() {
    let runtime = crate::endpoint::idle_polling(&mut tokio::runtime::Builder::new_current_thread())
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(calls_with_pauses());
}

/// Callers on all workers, at the same time: timers still fire, and each call ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_leave_a_worker_to_timers() {
    let worlds = Arc::new(tokio::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let (world, worlds) = (World::new().await, Arc::clone(&worlds));
        tasks.push(tokio::spawn(async move {
            for count in 1..=300 {
                world.call(count).await;
            }
            worlds.lock().await.push(world);
        }));
    }
    let ticks = async {
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, ticks).await.expect("timers did not fire");
    for task in tasks {
        tokio::time::timeout(TIMEOUT, task).await.expect("a call did not end").unwrap();
    }
}

/// The answer comes while every caller has gone to sleep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_wakes_a_caller_that_sleeps() {
    let (client, server) = endpoints(&Config::default()).await;
    let server = Arc::new(server);
    client.start(Echo::default(), &settings());
    server.start(Echo::default(), &settings());
    for count in 1..=20 {
        let server = Arc::clone(&server);
        let answer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(5 + count as u64 % 3)).await;
            send(&server, b"late");
        });
        let wait = poll_fn(|context: &mut Context<'_>| {
            if client.spin(None, || have_arrived(&client, count, None))
                || have_arrived(&client, count, Some(context.waker()))
            {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        });
        tokio::time::timeout(TIMEOUT, wait).await.expect("a wake-up was lost");
        answer.await.unwrap();
    }
    client.close();
    server.close();
}
