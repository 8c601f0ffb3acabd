//! The future of a memcpy.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::link::Link;
use super::link::token::{Outcome, Slot, Token};
use super::{ChannelError, MemRegion};
use tonic_rdma_verbs::internal::LocalMemory;

/// The future of [`Channel::memcpy`](super::Channel::memcpy). It yields the region that moved in, and the result. Dropping it
/// cancels nothing: the memory is freed when the device is done with it.
#[derive(Debug)]
#[must_use = "the region comes back with it"]
pub struct Memcpy {
    state: State,
}

#[derive(Debug)]
enum State {
    Over(Option<(MemRegion, Result<(), ChannelError>)>),
    Running { slot: Arc<Slot>, link: Arc<Link>, port: u32 },
}

impl Memcpy {
    /// One that ended before it began.
    pub(super) fn refused(region: MemRegion, error: ChannelError) -> Self {
        Self { state: State::Over(Some((region, Err(error)))) }
    }

    /// One that is over already.
    pub(super) fn done(region: MemRegion) -> Self {
        Self { state: State::Over(Some((region, Ok(())))) }
    }

    /// One that waits for the transfer that the token goes with.
    pub(super) fn new(link: Arc<Link>, port: u32) -> (Self, Token) {
        let slot = Arc::new(Slot::default());
        let token = Token::future(&slot);
        (Self { state: State::Running { slot, link, port } }, token)
    }

    /// Takes the region and the result if the operation has ended, without waiting.
    pub fn try_take(&mut self) -> Option<(MemRegion, Result<(), ChannelError>)> {
        match &mut self.state {
            State::Over(outcome) => outcome.take(),
            State::Running { slot, link, port } => {
                let found = slot.take().or_else(|| {
                    link.poll(*port);
                    slot.take()
                });
                found.and_then(outcome)
            }
        }
    }
}

impl Future for Memcpy {
    type Output = (MemRegion, Result<(), ChannelError>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(taken) = self.try_take() {
            return Poll::Ready(taken);
        }
        // What is long goes on with each poll of the queue.
        if let State::Running { slot, link, port } = &self.state
            && link.spin(*port, || slot.is_over())
            && let Some(taken) = self.try_take()
        {
            return Poll::Ready(taken);
        }
        match &self.state {
            State::Over(_) => Poll::Pending,
            State::Running { slot, .. } => match slot.poll(context).map(outcome) {
                Poll::Ready(Some(taken)) => Poll::Ready(taken),
                Poll::Ready(None) | Poll::Pending => Poll::Pending,
            },
        }
    }
}

fn outcome(outcome: Outcome) -> Option<(MemRegion, Result<(), ChannelError>)> {
    match outcome.local {
        LocalMemory::Region(region) => Some((region, outcome.result)),
        _ => None,
    }
}
