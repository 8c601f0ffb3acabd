//! A thing that the executor's thread lends to a task that waits, and takes back.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// A thing that is here, or with a task.
#[derive(Debug)]
pub(crate) struct Held<T> {
    place: Place<T>,
}

#[derive(Debug)]
enum Place<T> {
    Here(T),
    Away(oneshot::Receiver<T>),
    /// The task ended without giving it back, because its runtime ended or it panicked.
    Lost,
}

impl<T: Send + 'static> Held<T> {
    pub(crate) fn new(thing: T) -> Self {
        Self { place: Place::Here(thing) }
    }

    /// Returns the thing, or `None` if a task still has it.
    ///
    /// # Errors
    /// The task ended without giving it back.
    pub(crate) fn here(&mut self) -> Result<Option<&mut T>, Lost> {
        if let Place::Away(back) = &mut self.place {
            self.place = match back.try_recv() {
                Ok(thing) => Place::Here(thing),
                Err(oneshot::error::TryRecvError::Empty) => return Ok(None),
                Err(oneshot::error::TryRecvError::Closed) => Place::Lost,
            };
        }
        match &mut self.place {
            Place::Here(thing) => Ok(Some(thing)),
            Place::Away(_) => Ok(None),
            Place::Lost => Err(Lost),
        }
    }

    /// Returns the thing once it is here. Wakes the waker of `context` when a task gives it back.
    pub(crate) fn poll_here(&mut self, context: &mut Context<'_>) -> Poll<Result<&mut T, Lost>> {
        if let Place::Away(back) = &mut self.place {
            self.place = match Pin::new(back).poll(context) {
                Poll::Ready(Ok(thing)) => Place::Here(thing),
                Poll::Ready(Err(_)) => Place::Lost,
                Poll::Pending => return Poll::Pending,
            };
        }
        match &mut self.place {
            Place::Here(thing) => Poll::Ready(Ok(thing)),
            Place::Away(_) => Poll::Pending,
            Place::Lost => Poll::Ready(Err(Lost)),
        }
    }

    /// Gives the thing to a task of `runtime`, which gives it back when `wait` is over. Does nothing if the thing is not here.
    pub(crate) fn lend<F>(&mut self, runtime: &Handle, wait: impl FnOnce(T) -> F)
    where
        F: Future<Output = T> + Send + 'static,
    {
        match std::mem::replace(&mut self.place, Place::Lost) {
            Place::Here(thing) => {
                let (give, back) = oneshot::channel();
                let waiting = wait(thing);
                // A failed send means that the holder is gone, and with it the need for the thing.
                runtime.spawn(async move { _ = give.send(waiting.await) });
                self.place = Place::Away(back);
            }
            other => self.place = other,
        }
    }
}

/// The error of a thing that a task did not give back.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the threads of the session have ended")]
pub(crate) struct Lost;
