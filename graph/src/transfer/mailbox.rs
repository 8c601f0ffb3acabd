//! Tensors that came by calls, and wait for the executor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::sync::Notify;
use tonic_rdma_tensor::TensorSpec;

use crate::transfer::peers::WakerCell;
use tonic_rdma_verbs::internal::lock;

/// A tensor that came by a call. `content` has the length that `spec` says.
#[derive(Clone, Debug)]
pub(crate) struct Parcel {
    pub(crate) step: u64,
    pub(crate) spec: TensorSpec,
    pub(crate) content: Bytes,
}

/// The tensors of one crossing tensor in one mode. Calls that are in flight together may come in any order, so each parcel has a number.
///
/// At most `window` parcels wait here. A call whose parcel comes too early waits until there is a place, so that a parcel that is needed
/// sooner always has one. At most one call waits for each number, so at most `window` calls wait.
#[derive(Debug)]
pub(crate) struct Mailbox {
    name: String,
    window: u64,
    state: Mutex<State>,
    /// Notified when a parcel was taken.
    room: Notify,
    arrived: Arc<WakerCell>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the next parcel that the executor takes.
    next: u64,
    /// The step of the last parcel that was taken.
    last_step: Option<u64>,
    parcels: BTreeMap<u64, Parcel>,
    /// The numbers whose calls wait for a place.
    waiting: BTreeSet<u64>,
}

/// The reason why a parcel was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("tensor {sequence} of {name:?} came already")]
    Twice { name: String, sequence: u64 },
    #[error("tensor {sequence} of {name:?} waits already, in another call")]
    Waits { name: String, sequence: u64 },
    #[error("step {step} of {name:?} came already, or a later step came before it")]
    Step { name: String, step: u64 },
    #[error(
        "tensor {sequence} of {name:?} is too early: the receiver waits for tensor {next}, and the window is {window}"
    )]
    Early { name: String, sequence: u64, next: u64, window: u64 },
}

impl Mailbox {
    /// Makes a mailbox with room for `window` parcels. `arrived` is woken when the next parcel is there.
    pub(crate) fn new(name: &str, window: usize, arrived: Arc<WakerCell>) -> Self {
        let window = window.max(1) as u64;
        Self { name: name.to_owned(), window, state: Mutex::default(), room: Notify::new(), arrived }
    }

    /// Returns the place of the waker of the executor.
    pub(crate) fn arrived(&self) -> &WakerCell {
        &self.arrived
    }

    /// Puts a parcel in, once there is a place.
    ///
    /// # Errors
    /// The parcel came already, waits already, or could not be sent yet by a sender that keeps to the window.
    pub(crate) async fn put(&self, sequence: u64, parcel: Parcel) -> Result<(), Refusal> {
        let mut parcel = Some(parcel);
        let mut waiting = None;
        loop {
            let mut room = std::pin::pin!(self.room.notified());
            // From here on no removal is missed.
            room.as_mut().enable();
            if self.try_put(sequence, &mut parcel)? {
                return Ok(());
            }
            if waiting.is_none() {
                waiting = Some(self.wait(sequence)?);
            }
            room.await;
        }
    }

    /// Notes that a call waits, until the guard is dropped.
    fn wait(&self, sequence: u64) -> Result<Waiting<'_>, Refusal> {
        if lock(&self.state).waiting.insert(sequence) {
            Ok(Waiting { mailbox: self, sequence })
        } else {
            Err(Refusal::Waits { name: self.name.clone(), sequence })
        }
    }

    /// Puts the parcel in if there is a place.
    fn try_put(&self, sequence: u64, parcel: &mut Option<Parcel>) -> Result<bool, Refusal> {
        let mut state = lock(&self.state);
        let (name, window, next) = (self.name.clone(), self.window, state.next);
        if sequence < next || state.parcels.contains_key(&sequence) {
            return Err(Refusal::Twice { name, sequence });
        }
        // The sender has at most `window` calls in flight, and each earlier call has found a place.
        if sequence - next >= 2 * window {
            return Err(Refusal::Early { name, sequence, next, window });
        }
        let Some(step) = parcel.as_ref().map(|parcel| parcel.step) else { return Ok(true) };
        let earlier = state.parcels.range(..sequence).next_back().map(|(_, parcel)| parcel.step);
        let later = state.parcels.range(sequence..).next().map(|(_, parcel)| parcel.step);
        let ascends = earlier.or(state.last_step).is_none_or(|earlier| earlier < step)
            && later.is_none_or(|later| step < later);
        if !ascends {
            return Err(Refusal::Step { name, step });
        }
        if sequence - next >= window {
            return Ok(false);
        }
        if let Some(parcel) = parcel.take() {
            state.parcels.insert(sequence, parcel);
        }
        drop(state);
        if sequence == next {
            self.arrived.wake();
        }
        Ok(true)
    }

    /// Takes the next parcel if it is there.
    pub(crate) fn take(&self) -> Option<Parcel> {
        let mut state = lock(&self.state);
        let next = state.next;
        let parcel = state.parcels.remove(&next)?;
        state.next += 1;
        state.last_step = Some(parcel.step);
        drop(state);
        self.room.notify_waiters();
        Some(parcel)
    }
}

/// A call that waits for a place.
#[derive(Debug)]
struct Waiting<'a> {
    mailbox: &'a Mailbox,
    sequence: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.mailbox.state).waiting.remove(&self.sequence);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use tonic_rdma_tensor::{Dtype, Shape};

    use super::*;

    fn parcel(step: u64) -> Parcel {
        let spec = TensorSpec::new(Dtype::U8, Shape::new(&[1]).unwrap()).unwrap();
        Parcel { step, spec, content: Bytes::copy_from_slice(&[step as u8]) }
    }

    fn put(mailbox: &Mailbox, sequence: u64, step: u64) -> Option<Result<(), Refusal>> {
        let mut context = Context::from_waker(Waker::noop());
        match pin!(mailbox.put(sequence, parcel(step))).poll(&mut context) {
            std::task::Poll::Ready(result) => Some(result),
            std::task::Poll::Pending => None,
        }
    }

    #[test]
    fn parcels_come_in_any_order_and_leave_in_the_right_one() {
        let mailbox = Mailbox::new("relu", 2, Arc::default());
        assert_eq!(put(&mailbox, 1, 20), Some(Ok(())));
        assert!(mailbox.take().is_none(), "the first one is not here");
        assert_eq!(put(&mailbox, 2, 30), None, "there is no place yet");
        assert_eq!(put(&mailbox, 0, 10), Some(Ok(())));
        assert_eq!(mailbox.take().unwrap().step, 10);
        assert_eq!(put(&mailbox, 2, 30), Some(Ok(())));
        assert_eq!([mailbox.take().unwrap().step, mailbox.take().unwrap().step], [20, 30]);
        assert!(mailbox.take().is_none());
    }

    #[test]
    fn a_parcel_waits_once() {
        let mailbox = Mailbox::new("relu", 1, Arc::default());
        let mut context = Context::from_waker(Waker::noop());
        let mut first = Box::pin(mailbox.put(1, parcel(20)));
        assert!(first.as_mut().poll(&mut context).is_pending(), "there is no place yet");
        let refusal = put(&mailbox, 1, 20).unwrap().unwrap_err().to_string();
        assert_eq!(refusal, "tensor 1 of \"relu\" waits already, in another call");
        // The caller gives up, and sends the tensor again.
        drop(first);
        let mut second = Box::pin(mailbox.put(1, parcel(20)));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert_eq!(put(&mailbox, 0, 10), Some(Ok(())));
        assert_eq!(mailbox.take().unwrap().step, 10);
        assert!(second.as_mut().poll(&mut context).is_ready());
        drop(second);
        assert_eq!(
            put(&mailbox, 1, 20).unwrap().unwrap_err().to_string(),
            "tensor 1 of \"relu\" came already"
        );
        assert_eq!(mailbox.take().unwrap().step, 20);
    }

    #[test]
    fn a_parcel_that_no_honest_sender_sends_is_refused_by_name() {
        let mailbox = Mailbox::new("relu", 1, Arc::default());
        let refusal = |sequence, step| put(&mailbox, sequence, step).unwrap().unwrap_err().to_string();
        assert_eq!(
            refusal(2, 1),
            "tensor 2 of \"relu\" is too early: the receiver waits for tensor 0, and the window is 1"
        );
        assert_eq!(put(&mailbox, 0, 7), Some(Ok(())));
        assert_eq!(refusal(0, 8), "tensor 0 of \"relu\" came already");
        assert_eq!(refusal(1, 7), "step 7 of \"relu\" came already, or a later step came before it");
        assert_eq!(mailbox.take().unwrap().step, 7);
        assert_eq!(refusal(0, 8), "tensor 0 of \"relu\" came already");
        assert_eq!(refusal(1, 7), "step 7 of \"relu\" came already, or a later step came before it");
        assert_eq!(
            refusal(u64::MAX, 9).split(':').next(),
            Some("tensor 18446744073709551615 of \"relu\" is too early")
        );
    }
}
