//! Statuses and deadlines, as they stand in heads and trailers.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode};
use tonic::{Code, Status};

use crate::transport::fields::field;

/// The field that holds the code of a call's status.
pub(super) const STATUS: &str = "grpc-status";
/// The field that holds the client's deadline.
const TIMEOUT: &str = "grpc-timeout";
/// Most digits of its number.
const TIMEOUT_DIGITS: usize = 8;

/// Returns the time that the client gives the call. A field that can't be read does not count, as with tonic.
pub(super) fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let text = field(headers, TIMEOUT)?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if number.is_empty()
        || number.len() > TIMEOUT_DIGITS
        || !number.bytes().all(|digit| digit.is_ascii_digit())
    {
        return None;
    }
    let number: u64 = number.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// Returns the trailers for a status.
pub(super) fn trailers_of(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(3);
    // tonic refuses no status of ours. If it did, the code alone says enough.
    if status.add_header(&mut trailers).is_err() {
        trailers.clear();
        trailers.insert(STATUS, HeaderValue::from(status.code() as i32));
    }
    trailers
}

/// Returns the status for a response with this status of HTTP and without a status of gRPC. A native response has no status of
/// HTTP, so the server does what a client does over HTTP/2 (grpc/doc/http-grpc-status-mapping.md).
pub(super) fn of_http(status: StatusCode) -> Status {
    let code = match status {
        StatusCode::BAD_REQUEST => Code::Internal,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::Unimplemented,
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Code::Unavailable,
        _ => Code::Unknown,
    };
    Status::new(code, format!("grpc-status header missing, mapped from HTTP status code {}", status.as_u16()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn timeouts_are_read_as_the_specification_writes_them() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(TIMEOUT, text.parse().unwrap());
            timeout_of(&headers)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("42S"), Some(Duration::from_secs(42)));
        assert_eq!(read("13m"), Some(Duration::from_millis(13)));
        assert_eq!(read("2u"), Some(Duration::from_micros(2)));
        assert_eq!(read("99999999n"), Some(Duration::from_nanos(99_999_999)));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "S", "1", "1s", "-1S", "+1S", "1.5S", "123456789S", "1 S"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
        assert_eq!(timeout_of(&HeaderMap::new()), None);
    }

    #[test]
    fn a_status_of_http_becomes_one_of_grpc() {
        assert_eq!(of_http(StatusCode::NOT_FOUND).code(), Code::Unimplemented);
        assert_eq!(of_http(StatusCode::SERVICE_UNAVAILABLE).code(), Code::Unavailable);
        assert_eq!(of_http(StatusCode::IM_A_TEAPOT).code(), Code::Unknown);
        let trailers = trailers_of(&of_http(StatusCode::UNAUTHORIZED));
        assert_eq!(Status::from_header_map(&trailers).unwrap().code(), Code::Unauthenticated);
    }
}
