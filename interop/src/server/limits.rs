//! What clients may ask for. All that a request can make the server hold or wait for has a bound here.

use std::time::Duration;

use bytes::Bytes;
use tonic::Status;

/// Largest payload, in bytes.
pub(super) const PAYLOAD: usize = 64 << 20;

/// Largest message: a payload, and the fields beside it.
pub(super) const MESSAGE: usize = PAYLOAD + (64 << 10);

/// Largest request of the official service. One may ask for a reply with every two bytes.
pub(super) const OFFICIAL_REQUEST: usize = 16 << 20;

/// Most replies that the requests of one half duplex call may ask for.
pub(super) const HALF_DUPLEX_REPLIES: usize = 64 << 10;

/// Longest wait before a reply.
const INTERVAL: Duration = Duration::from_secs(60);

/// A payload of `size` zeros.
pub(super) fn zeros(size: i32) -> Result<Bytes, Status> {
    let size = usize::try_from(size)
        .map_err(|_| Status::invalid_argument(format!("a response of {size} bytes is asked for")))?;
    within(size)?;
    Ok(vec![0; size].into())
}

/// `size`, if a payload may have it.
pub(super) fn within(size: usize) -> Result<usize, Status> {
    if size > PAYLOAD {
        return Err(Status::resource_exhausted(format!(
            "a response of {size} bytes is asked for; this server's limit is {PAYLOAD}"
        )));
    }
    Ok(size)
}

/// How long to wait before a reply.
pub(super) fn interval(microseconds: i32) -> Result<Duration, Status> {
    let interval = u64::try_from(microseconds).map(Duration::from_micros);
    interval.ok().filter(|interval| *interval <= INTERVAL).ok_or_else(|| {
        Status::invalid_argument(format!(
            "an interval of {microseconds} us is asked for; this server takes 0 to {} us",
            INTERVAL.as_micros()
        ))
    })
}
