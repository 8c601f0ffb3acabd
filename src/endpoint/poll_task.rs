//! The task that keeps a reactor's queues from starving, and that its event descriptors wake.

use std::future::Future as _;
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::queue::Queue;
use super::reactor::{Reactor, Step};
use tonic_rdma_verbs::VerbsError;

/// How long a runtime that is never idle may leave its queues alone.
const WATCH: Duration = Duration::from_millis(1);
/// How long a sleep lasts while words are watched.
const NAP: Duration = Duration::from_millis(20);

/// A queue's event descriptor, registered with the runtime.
#[derive(Debug)]
pub(crate) struct Waiter {
    /// A duplicate, which stays valid however the queue ends.
    descriptor: AsyncFd<OwnedFd>,
    queue: Weak<Queue>,
}

/// Registers the queues' event descriptors with the current runtime.
#[allow(deprecated, reason = "sound for a descriptor that is owned; its successor is unsafe to call")]
pub(crate) fn waiters(queues: &[Arc<Queue>]) -> Result<Vec<Waiter>, VerbsError> {
    queues
        .iter()
        .map(|queue| {
            let failed = |error| VerbsError::os("watching a completion queue", error);
            let descriptor = queue.event_fd().try_clone_to_owned().map_err(failed)?;
            let descriptor = AsyncFd::with_interest(descriptor, Interest::READABLE).map_err(failed)?;
            Ok(Waiter { descriptor, queue: Arc::downgrade(queue) })
        })
        .collect()
}

/// Runs until the reactor is gone.
pub(crate) async fn run(reactor: Weak<Reactor>, waiters: Vec<Waiter>, kick: Arc<Notify>) {
    let mut watched = false;
    loop {
        // The reactor is not kept alive across an await: it goes with its last connection or listener.
        let Some(step) = reactor.upgrade().map(|reactor| reactor.step(watched)) else { return };
        watched = false;
        match step {
            Step::Again => run_again().await,
            Step::Sleep => sleep(&reactor, &waiters, &kick).await,
            Step::Watch => match timeout(WATCH, event_or_kick(&waiters, &kick)).await {
                Ok(true) => event(&reactor),
                Ok(false) => {}
                Err(_) => watched = true,
            },
        }
    }
}

/// Waits for an event or a kick. While words of peers are watched, looks at them now and then: a device that places late may
/// bring a word after the peer has looked whether we sleep, and no bell then tells of it.
async fn sleep(reactor: &Weak<Reactor>, waiters: &[Waiter], kick: &Notify) {
    let set_nap = |wanted| reactor.upgrade().is_some_and(|reactor| reactor.set_nap(wanted));
    let mut length = set_nap(true).then_some(NAP);
    let came = loop {
        let woken = event_or_kick(waiters, kick);
        let Some(nap) = length else { break woken.await };
        if let Ok(came) = timeout(nap, woken).await {
            break came;
        }
        let Some(reactor) = reactor.upgrade() else { return };
        if reactor.wake_untold() {
            break false;
        }
        length = reactor.set_nap(true).then_some(NAP);
    };
    set_nap(false);
    if came {
        event(reactor);
    }
}

fn event(reactor: &Weak<Reactor>) {
    if let Some(reactor) = reactor.upgrade() {
        reactor.event();
    }
}

/// Lets every task that is runnable now run first. Unlike tokio's `yield_now` it does not ask for a system call; and in a
/// multi-thread runtime another worker may take this task over, should a task keep this one's thread.
async fn run_again() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Waits; true if a queue had an event.
async fn event_or_kick(waiters: &[Waiter], kick: &Notify) -> bool {
    let mut kicked = pin!(kick.notified());
    poll_fn(|context| {
        if take_events(waiters, context) {
            return Poll::Ready(true);
        }
        kicked.as_mut().poll(context).map(|()| false)
    })
    .await
}

/// Takes every event there is, and registers `context` with the queues that have none.
fn take_events(waiters: &[Waiter], context: &mut Context<'_>) -> bool {
    let mut any = false;
    for waiter in waiters {
        while let Poll::Ready(Ok(mut guard)) = waiter.descriptor.poll_read_ready(context) {
            any = true;
            if let Some(queue) = waiter.queue.upgrade() {
                queue.acknowledge_events();
            }
            guard.clear_ready();
        }
    }
    any
}
