//! One call many times: on one channel, or each time on a new channel.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::official::payload;
use crate::client::case::{CaseError, CaseResult, Session, SoakOptions, ensure, ensure_zeros};
use crate::proto::testing::SimpleRequest;

/// Returns the time limit of a whole soak.
pub(crate) fn timeout(options: &SoakOptions) -> Duration {
    let default = u64::from(options.iterations) * u64::from(options.max_latency_ms);
    let given = options.overall_timeout_seconds.map(|seconds| Duration::from_secs(seconds.into()));
    given.unwrap_or(Duration::from_millis(default))
}

pub(super) async fn rpc_soak(session: Session) -> CaseResult {
    soak(session, false).await
}

pub(super) async fn channel_soak(session: Session) -> CaseResult {
    soak(session, true).await
}

async fn soak(session: Session, new_channels: bool) -> CaseResult {
    let options = session.soak;
    let body: Bytes = vec![0; options.request_size as usize].into();
    let body = Arc::new(body);
    let mut threads = JoinSet::new();
    for _ in 0..options.threads {
        threads.spawn(run_thread(session.clone(), new_channels, body.clone()));
    }
    // Calls that are not done at the deadline have failed.
    let deadline = Instant::now() + timeout(&options);
    let (mut done, mut failures) = (0, Vec::new());
    while let Ok(Some(ended)) = tokio::time::timeout_at(deadline, threads.join_next()).await {
        let thread =
            ended.map_err(|error| CaseError::Failed(format!("a task of the soak ended: {error}")))?;
        done += u64::from(options.iterations);
        failures.extend(thread);
    }
    let all = u64::from(options.iterations) * u64::from(options.threads);
    ensure(done == all, || {
        format!("{done} of {all} calls were done within {} s", timeout(&options).as_secs_f64())
    })?;
    ensure(failures.len() as u64 <= u64::from(options.max_failures), || {
        let first = failures.first().map(String::as_str).unwrap_or_default();
        format!("{} of {all} calls failed, {} may; the first: {first}", failures.len(), options.max_failures)
    })
}

/// Makes the calls of one thread, and returns the reason of each failure.
async fn run_thread(session: Session, new_channels: bool, body: Arc<Bytes>) -> Vec<String> {
    let mut failures = Vec::new();
    for iteration in 0..session.soak.iterations {
        let started = Instant::now();
        let ended = call(&session, new_channels, Bytes::clone(&body)).await;
        let (taken, limit) = (started.elapsed(), Duration::from_millis(session.soak.max_latency_ms.into()));
        match ended {
            Err(CaseError::Failed(reason) | CaseError::Skipped(reason)) => {
                failures.push(format!("call {iteration}: {reason}"));
            }
            Ok(()) if taken > limit => {
                failures.push(format!("call {iteration} took {taken:?}, more than {limit:?}"));
            }
            Ok(()) => {}
        }
    }
    failures
}

async fn call(session: &Session, new_channel: bool, body: Bytes) -> CaseResult {
    let session = if new_channel {
        let connected =
            session.target.connect().await.map_err(|error| CaseError::Failed(error.with_causes()))?;
        Session::new(connected.channel, session.target.clone(), session.soak)
    } else {
        session.clone()
    };
    let size = session.soak.response_size;
    let request = SimpleRequest { response_size: size as i32, payload: payload(body), ..Default::default() };
    let reply = session.official().unary_call(request).await?.into_inner();
    ensure_zeros("the reply", &reply.payload.unwrap_or_default().body, size as usize)
}
