//! Streams of replies, which a task produces.

use std::future::Future;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// A stream of replies. A status ends the call.
pub(super) type Replies<M> = ReceiverStream<Result<M, Status>>;

/// The task's side of a stream. At most one reply waits for the client, because the client may read slowly.
#[derive(Debug)]
pub(super) struct Sender<M> {
    sender: mpsc::Sender<Result<M, Status>>,
}

impl<M> Sender<M> {
    pub(super) async fn send(&self, message: M) -> Result<(), EarlyEnd> {
        self.sender.send(Ok(message)).await.map_err(|_| EarlyEnd::Gone)
    }
}

/// The reason why a task ends early.
#[derive(Debug)]
pub(super) enum EarlyEnd {
    Status(Status),
    /// The client has ended the call.
    Gone,
}

impl From<Status> for EarlyEnd {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// Returns the stream of a new task, which `replying` makes. The end of the call ends the task at any point.
pub(super) fn replies<M, F>(replying: impl FnOnce(Sender<M>) -> F) -> Replies<M>
where
    M: Send + 'static,
    F: Future<Output = Result<(), EarlyEnd>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1);
    let task = replying(Sender { sender: sender.clone() });
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = task => ended,
            () = sender.closed() => return,
        };
        if let Err(EarlyEnd::Status(status)) = ended {
            // The send fails only if the client has ended the call.
            let _ = sender.send(Err(status)).await;
        }
    });
    ReceiverStream::new(receiver)
}
