//! What a transfer's owner is told, and how.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

use super::super::{ChannelError, lock};
use super::{End, Link};
use tonic_rdma_verbs::internal::LocalMemory;

/// A transfer's end.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The memory that had moved in.
    pub(crate) local: LocalMemory,
    pub(crate) result: Result<(), ChannelError>,
}

/// Who is told, and whose bell is to be rung.
#[derive(Debug)]
pub(crate) struct Token {
    who: Who,
    ring: Option<Ring>,
}

enum Who {
    /// Nobody.
    Nobody,
    /// A future.
    Future(Arc<Slot>),
    /// A function, called by whoever polls the queue: it must not wait.
    Function(Box<dyn FnOnce(Outcome) + Send>),
}

/// The peer may sleep until what was written is there.
#[derive(Debug)]
struct Ring {
    link: Weak<Link>,
    end: Arc<End>,
    epoch: u64,
    port: u32,
}

/// Where a future finds the end of its transfer.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Outcome>,
    waker: Option<Waker>,
}

impl Token {
    /// Nobody is told.
    pub(crate) fn quiet() -> Self {
        Self { who: Who::Nobody, ring: None }
    }

    /// A future is told.
    pub(crate) fn future(slot: &Arc<Slot>) -> Self {
        Self { who: Who::Future(Arc::clone(slot)), ring: None }
    }

    /// `function` is called, by whoever polls the queue.
    pub(crate) fn call(function: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Self { who: Who::Function(Box::new(function)), ring: None }
    }

    /// Rings the peer's bell besides, if it sleeps until `epoch` then.
    pub(crate) fn ring(self, link: &Arc<Link>, end: &Arc<End>, epoch: u64, port: u32) -> Self {
        Self { ring: Some(Ring { link: Arc::downgrade(link), end: Arc::clone(end), epoch, port }), ..self }
    }

    /// Ends a transfer that needs no device.
    pub(crate) fn finish(self, local: LocalMemory) {
        let mut wakers = Vec::new();
        self.deliver(Outcome { local, result: Ok(()) }, &mut wakers);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Tells. The task to wake is added to `wakers`.
    pub(super) fn deliver(self, outcome: Outcome, wakers: &mut Vec<Waker>) {
        if let (Ok(()), Some(ring)) = (&outcome.result, self.ring)
            && let Some(link) = ring.link.upgrade()
        {
            // If that fails the link does, which its owner learns.
            let _ = link.ring_sleeper(&ring.end, ring.epoch, ring.port);
        }
        match self.who {
            Who::Nobody => {}
            Who::Future(slot) => {
                let mut state = lock(&slot.state);
                state.outcome = Some(outcome);
                wakers.extend(state.waker.take());
            }
            Who::Function(function) => function(outcome),
        }
    }
}

impl Slot {
    /// Takes the outcome once it is there.
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<Outcome> {
        let mut state = lock(&self.state);
        match state.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Whether the outcome is there; the task is woken when it is.
    pub(crate) fn is_ready(&self, context: &Context<'_>) -> bool {
        let mut state = lock(&self.state);
        if state.outcome.is_none() {
            state.waker = Some(context.waker().clone());
        }
        state.outcome.is_some()
    }

    /// Whether the outcome is there.
    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).outcome.is_some()
    }

    /// Takes the outcome if it is there.
    pub(crate) fn take(&self) -> Option<Outcome> {
        lock(&self.state).outcome.take()
    }
}

impl fmt::Debug for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nobody => "Nobody",
            Self::Future(_) => "Future",
            Self::Function(_) => "Function",
        })
    }
}
