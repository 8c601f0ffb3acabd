//! The unary cases of the official list, such as `empty_unary` and `large_unary`.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::task::JoinSet;
use tonic::{Code, Request};

use crate::client::case::{CaseError, CaseResult, Session, ensure, ensure_code, ensure_eq, ensure_zeros};
use crate::proto::testing::{Empty, Payload, SimpleRequest};

const REQUEST: usize = 271_828;
const RESPONSE: usize = 314_159;

/// Number of calls of `concurrent_large_unary`, from the official descriptions.
const CONCURRENT: usize = 1000;

/// Returns a payload of zeros.
pub(super) fn zeros(size: usize) -> Option<Payload> {
    payload(vec![0; size].into())
}

pub(super) fn payload(body: Bytes) -> Option<Payload> {
    Some(Payload { body, ..Default::default() })
}

/// Returns the request of `large_unary`.
pub(super) fn large() -> SimpleRequest {
    large_of(vec![0; REQUEST].into())
}

fn large_of(body: Bytes) -> SimpleRequest {
    SimpleRequest { response_size: RESPONSE as i32, payload: payload(body), ..Default::default() }
}

pub(super) async fn empty_unary(session: Session) -> CaseResult {
    let reply = session.official().empty_call(Empty {}).await?.into_inner();
    ensure_eq("the reply", reply, Empty {})
}

pub(super) async fn large_unary(session: Session) -> CaseResult {
    let reply = session.official().unary_call(large()).await?.into_inner();
    ensure_zeros("the reply", &reply.payload.unwrap_or_default().body, RESPONSE)
}

pub(super) async fn concurrent_large_unary(session: Session) -> CaseResult {
    let body: Bytes = vec![0; REQUEST].into();
    let mut calls = JoinSet::new();
    for _ in 0..CONCURRENT {
        let mut client = session.official();
        let request = large_of(body.clone());
        calls.spawn(async move {
            let reply = client.unary_call(request).await?.into_inner();
            ensure_zeros("a reply", &reply.payload.unwrap_or_default().body, RESPONSE)
        });
    }
    while let Some(ended) = calls.join_next().await {
        ended.map_err(|error| CaseError::Failed(format!("a call's task ended: {error}")))??;
    }
    Ok(())
}

/// Checks that the reply is a time, and that caches may keep it. In the official case the second reply may come from a cache; here
/// there is none. The times are not compared, because gRPC's own server in C++ sends the nanoseconds within the second, and a
/// clock may go back.
pub(super) async fn cacheable_unary(session: Session) -> CaseResult {
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let body: Bytes = before.to_string().into();
    for _ in 0..2 {
        let mut request =
            Request::new(SimpleRequest { payload: payload(body.clone()), ..Default::default() });
        request.metadata_mut().insert("x-user-ip", tonic::metadata::MetadataValue::from_static("1.2.3.4"));
        let reply = session.official().cacheable_unary_call(request).await?;
        let control = reply.metadata().get("cache-control").and_then(|value| value.to_str().ok());
        let control = control.unwrap_or_default().to_owned();
        ensure(control.contains("max-age=60") && control.contains("public"), || {
            format!("cache-control: expected max-age=60, public; found {control:?}")
        })?;
        let body = reply.into_inner().payload.unwrap_or_default().body;
        let time = std::str::from_utf8(&body).ok().and_then(|text| text.parse::<u128>().ok());
        ensure(time.is_some(), || format!("the reply: expected a time, found {body:?}"))?;
    }
    Ok(())
}

pub(super) async fn unimplemented_method(session: Session) -> CaseResult {
    let ended = session.official().unimplemented_call(Empty {}).await;
    ensure_code("a method that no server implements", ended, Code::Unimplemented).map(drop)
}

pub(super) async fn unimplemented_service(session: Session) -> CaseResult {
    let ended = session.unimplemented().unimplemented_call(Empty {}).await;
    ensure_code("a service that no server has", ended, Code::Unimplemented).map(drop)
}
