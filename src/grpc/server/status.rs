//! Statuses, as they stand in heads and trailers.

use http::{HeaderMap, HeaderValue, StatusCode};
use tonic::{Code, Status};

/// The field that holds the code of a call's status.
pub(super) const STATUS: &str = "grpc-status";
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
    fn a_status_of_http_becomes_one_of_grpc() {
        assert_eq!(of_http(StatusCode::NOT_FOUND).code(), Code::Unimplemented);
        assert_eq!(of_http(StatusCode::SERVICE_UNAVAILABLE).code(), Code::Unavailable);
        assert_eq!(of_http(StatusCode::IM_A_TEAPOT).code(), Code::Unknown);
        let trailers = trailers_of(&of_http(StatusCode::UNAUTHORIZED));
        assert_eq!(Status::from_header_map(&trailers).unwrap().code(), Code::Unauthenticated);
    }
}
