//! Replies to requests: their limits, and streams of them, which a task produces. Every amount of memory or
//! time that a request can ask for has a bound here.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
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

/// Largest payload, in bytes.
pub(super) const PAYLOAD: usize = 64 << 20;

/// Largest message, in bytes: a payload, and the other fields.
pub(super) const MESSAGE: usize = PAYLOAD + (64 << 10);

/// Largest request of the official service, in bytes. A request may ask for one reply with every two bytes.
pub(super) const OFFICIAL_REQUEST: usize = 16 << 20;

/// Maximum number of replies that the requests of one half duplex call may ask for.
pub(super) const HALF_DUPLEX_REPLIES: usize = 64 << 10;

/// Longest interval before a reply.
const INTERVAL: Duration = Duration::from_secs(60);

/// Returns a payload of `size` zeros.
pub(super) fn zeros(size: i32) -> Result<Bytes, Status> {
    let size = usize::try_from(size)
        .map_err(|_| Status::invalid_argument(format!("the request asks for a response of {size} bytes")))?;
    within(size)?;
    Ok(vec![0; size].into())
}

/// Returns `size` if a payload may have this size.
pub(super) fn within(size: usize) -> Result<usize, Status> {
    if size > PAYLOAD {
        return Err(Status::resource_exhausted(format!(
            "the request asks for a response of {size} bytes; this server's limit is {PAYLOAD}"
        )));
    }
    Ok(size)
}

/// Returns the interval before a reply.
pub(super) fn interval(microseconds: i32) -> Result<Duration, Status> {
    let interval = u64::try_from(microseconds).map(Duration::from_micros);
    interval.ok().filter(|interval| *interval <= INTERVAL).ok_or_else(|| {
        Status::invalid_argument(format!(
            "the request asks for an interval of {microseconds} us; this server takes 0 to {} us",
            INTERVAL.as_micros()
        ))
    })
}
