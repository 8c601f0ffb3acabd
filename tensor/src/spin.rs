//! Waiting without sleeping.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::{Channel, RdmaDevice};

impl RdmaDevice {
    /// Runs `future` to its end on this thread, without ever sleeping: polls it, and the queue of `channel`, in turn. For
    /// threads that have a core of their own and do nothing but move tensors; the runtime's timers and other tasks do not run
    /// meanwhile on a current-thread runtime.
    pub fn spin<F: Future>(&self, channel: &Channel, future: F) -> F::Output {
        let _runtime = self.shared.runtime.enter();
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            channel.poll();
            std::hint::spin_loop();
        }
    }
}
