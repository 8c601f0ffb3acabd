//! How long the reader of a call waits for memory.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::Sleep;

use super::fault::CallFault;
use super::session::Stream;

/// The patience of one reader. Messages need memory that the application may hold; a reader that waits for it too long fails.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// The end of the wait, while there is one.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    /// Longest wait for memory.
    const TIME: Duration = Duration::from_secs(10);

    /// Call this when [`Stream::poll_part`] is pending. Ends the call and returns the reason if its memory is missing for too long.
    pub(super) fn poll(&mut self, stream: &Stream, context: &mut Context<'_>) -> Poll<CallFault> {
        if !stream.is_starved() {
            self.sleep = None;
            return Poll::Pending;
        }
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep(Self::TIME)));
        ready!(sleep.as_mut().poll(context));
        Poll::Ready(stream.give_up(Self::TIME))
    }
}
