//! Streams of replies that a task makes.

use std::future::Future;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// A reply, or the status that the call ends with.
pub(super) type Replies<M> = ReceiverStream<Result<M, Status>>;

/// The task's end of a stream. The client takes replies as fast as it likes: no more than one waits for it here.
#[derive(Debug)]
pub(super) struct Sender<M> {
    sender: mpsc::Sender<Result<M, Status>>,
}

impl<M> Sender<M> {
    pub(super) async fn send(&self, message: M) -> Result<(), End> {
        self.sender.send(Ok(message)).await.map_err(|_| End::Gone)
    }
}

/// Why a task ends before its time.
#[derive(Debug)]
pub(super) enum End {
    Status(Status),
    /// Nobody is left to tell.
    Gone,
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// The stream that the task made by `replying` fills. The task ends when the call does, whatever it waits for.
pub(super) fn replies<M, F>(replying: impl FnOnce(Sender<M>) -> F) -> Replies<M>
where
    M: Send + 'static,
    F: Future<Output = Result<(), End>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1);
    let task = replying(Sender { sender: sender.clone() });
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = task => ended,
            () = sender.closed() => return,
        };
        if let Err(End::Status(status)) = ended {
            // Fails only when nobody is left to tell.
            let _ = sender.send(Err(status)).await;
        }
    });
    ReceiverStream::new(receiver)
}
