//! How a call ended, as the runtime has it.

use http::{HeaderMap, StatusCode};
use tonic::{Code, Status};
use tonic_rdma::unstable::status_of_http;

use crate::framing::Message;

/// The end of a call at the client.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) code: i32,
    pub(crate) details: String,
    pub(crate) initial: HeaderMap,
    pub(crate) trailing: HeaderMap,
    /// Of a call with one response that succeeded.
    pub(crate) response: Option<Message>,
}

impl End {
    /// The end of a call by `status`, which this end or the peer gave it.
    pub(crate) fn of_status(status: &Status, initial: HeaderMap) -> Self {
        Self {
            code: status.code() as i32,
            details: status.message().to_owned(),
            initial,
            trailing: status.metadata().clone().into_headers(),
            response: None,
        }
    }

    /// The end of a call whose response has ended with `trailers`.
    pub(crate) fn of_trailers(http: StatusCode, initial: HeaderMap, trailing: HeaderMap) -> Self {
        let status = Status::from_header_map(&trailing).unwrap_or_else(|| without_status(http));
        Self {
            code: status.code() as i32,
            details: status.message().to_owned(),
            initial,
            trailing,
            response: None,
        }
    }

    /// The end of a call with one response that has none, or more than one.
    pub(crate) fn wrong_count(self, details: &str) -> Self {
        Self { code: Code::Unimplemented as i32, details: details.to_owned(), response: None, ..self }
    }
}

/// Returns the status of a response that has none.
fn without_status(http: StatusCode) -> Status {
    match http {
        StatusCode::OK => Status::unknown("the response ended without a status"),
        http => status_of_http(http),
    }
}
