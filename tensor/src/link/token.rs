//! Tokens, by which the owner of a transfer learns that the transfer has ended.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

use crate::error::ChannelError;
use crate::link::Link;
use crate::link::word_pair::WordPair;
use tonic_rdma_verbs::internal::{LocalMemory, lock, wake_all};

/// The end of a transfer.
pub(crate) struct Outcome {
    /// The memory that had moved into the transfer.
    pub(crate) local: LocalMemory,
    pub(crate) result: Result<(), ChannelError>,
}

/// The recipient of a transfer's outcome, and the bell to ring.
pub(crate) struct Token {
    recipient: Recipient,
    ring: Option<Ring>,
}

enum Recipient {
    /// The outcome is dropped.
    None,
    /// A future waits for the outcome.
    Future(Arc<OutcomeCell>),
    /// The thread that polls the queue calls a function, which must not wait.
    Function(Box<dyn FnOnce(Outcome) + Send>),
}

/// A bell to ring when a transfer has ended, because the peer may sleep until then.
struct Ring {
    link: Weak<Link>,
    pair: Arc<WordPair>,
    epoch: u64,
    port: u32,
}

/// The place where a future finds the outcome of its transfer.
#[derive(Default)]
pub(crate) struct OutcomeCell {
    state: Mutex<Settlement>,
}

#[derive(Default)]
struct Settlement {
    outcome: Option<Outcome>,
    waiter: Waiter,
}

/// The receiver of an outcome that is not there yet.
#[derive(Default)]
enum Waiter {
    #[default]
    None,
    Task(Waker),
    Function(Box<dyn FnOnce(Outcome) + Send>),
}

impl Token {
    /// Makes a token that drops the outcome.
    pub(crate) fn unobserved() -> Self {
        Self { recipient: Recipient::None, ring: None }
    }

    /// Makes a token that puts the outcome into `cell`.
    pub(crate) fn future(cell: &Arc<OutcomeCell>) -> Self {
        Self { recipient: Recipient::Future(Arc::clone(cell)), ring: None }
    }

    /// Makes a token that calls `function`, from the thread that polls the queue.
    pub(crate) fn call(function: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Self { recipient: Recipient::Function(Box::new(function)), ring: None }
    }

    /// Adds a bell: if the peer sleeps until `epoch` when the transfer has ended, the peer is woken.
    pub(crate) fn ring(self, link: Weak<Link>, pair: &Arc<WordPair>, epoch: u64, port: u32) -> Self {
        Self { ring: Some(Ring { link, pair: Arc::clone(pair), epoch, port }), ..self }
    }

    /// Ends a transfer that needs no device.
    pub(crate) fn finish(self, local: LocalMemory) {
        let mut wakers = Vec::new();
        self.deliver(Outcome { local, result: Ok(()) }, &mut wakers);
        wake_all(wakers);
    }

    /// Delivers the outcome. The task to wake is added to `wakers`.
    pub(crate) fn deliver(self, outcome: Outcome, wakers: &mut Vec<Waker>) {
        if let (Ok(()), Some(ring)) = (&outcome.result, self.ring)
            && let Some(link) = ring.link.upgrade()
        {
            // If the bell fails, the link fails too, and the owner learns that.
            let _ = link.ring_sleeper(&ring.pair, ring.epoch, ring.port);
        }
        match self.recipient {
            Recipient::None => {}
            Recipient::Future(cell) => {
                let mut state = lock(&cell.state);
                match std::mem::take(&mut state.waiter) {
                    Waiter::Function(function) => {
                        drop(state);
                        function(outcome);
                    }
                    waiter => {
                        state.outcome = Some(outcome);
                        wakers.extend(match waiter {
                            Waiter::Task(waker) => Some(waker),
                            _ => None,
                        });
                    }
                }
            }
            Recipient::Function(function) => function(outcome),
        }
    }
}

impl OutcomeCell {
    /// Takes the outcome if it is there. Otherwise the task is woken when it is.
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<Outcome> {
        let mut state = lock(&self.state);
        match state.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                state.waiter = Waiter::Task(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Returns whether the outcome is there. If not, the task is woken when it is.
    pub(crate) fn is_ready(&self, context: &Context<'_>) -> bool {
        let mut state = lock(&self.state);
        if state.outcome.is_none() {
            state.waiter = Waiter::Task(context.waker().clone());
        }
        state.outcome.is_some()
    }

    /// Returns whether the outcome is there.
    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).outcome.is_some()
    }

    /// Calls `function` with the outcome: now if the outcome is there, otherwise from the thread that polls the queue.
    pub(crate) fn call(&self, function: impl FnOnce(Outcome) + Send + 'static) {
        let mut state = lock(&self.state);
        match state.outcome.take() {
            Some(outcome) => {
                drop(state);
                function(outcome);
            }
            None => state.waiter = Waiter::Function(Box::new(function)),
        }
    }

    /// Takes the outcome if it is there.
    pub(crate) fn take(&self) -> Option<Outcome> {
        lock(&self.state).outcome.take()
    }
}

impl fmt::Debug for OutcomeCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutcomeCell").finish_non_exhaustive()
    }
}
