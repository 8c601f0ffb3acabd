//! An operation under way, with the times of its begin and of its end.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use tonic_rdma::internal::lock;

/// A future and its times. Operations end on the progress thread of the communicator, which then wakes this future. The time of
/// this call is the end, also if the caller looks much later.
pub(super) struct Timed<F: Future> {
    flight: F,
    started: Instant,
    ended: Arc<Ended>,
}

#[derive(Default)]
struct Ended {
    /// The time of the latest call, and the task that waits.
    state: Mutex<(Option<Instant>, Option<Waker>)>,
}

impl<F: Future + Unpin> Timed<F> {
    /// Takes an operation that has just started.
    pub(super) fn new(flight: F, started: Instant) -> Self {
        Self { flight, started, ended: Arc::default() }
    }

    /// Polls the operation. Returns its output, its begin and its end.
    pub(super) fn poll(&mut self, task: Option<&Waker>) -> Poll<(F::Output, (Instant, Instant))> {
        let woken = {
            let mut state = lock(&self.ended.state);
            state.1 = task.cloned();
            state.0.take()
        };
        let waker = Waker::from(Arc::clone(&self.ended));
        let poll = Pin::new(&mut self.flight).poll(&mut Context::from_waker(&waker));
        poll.map(|output| (output, (self.started, woken.unwrap_or_else(Instant::now))))
    }
}

impl Wake for Ended {
    fn wake(self: Arc<Self>) {
        let task = {
            let mut state = lock(&self.state);
            state.0 = Some(Instant::now());
            state.1.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }
}
