//! Replies to requests: their limits, and streams of them. Every amount of memory or time that a request can ask for
//! has a bound here.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::BoxStream;
use tonic::Status;

/// A stream of replies, each of which is made when it can be sent, because the client may read slowly. A status ends
/// the call.
pub(super) type Replies<M> = BoxStream<'static, Result<M, Status>>;

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
