//! Calls to the service of another part, and the watch over it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Streaming};

use crate::error::GraphError;
use crate::placement::Part;
use crate::session::settings::{
    CONNECTION_WINDOW, MAX_FRAME, PING_INTERVAL, PING_LIMIT, STREAM_WINDOW, setting,
};
use crate::session::state::{Misfit, State, VERSION};
use crate::session::text::{describe, shortened};
use crate::transfer::proto::parts_client::PartsClient;
use crate::transfer::proto::{HelloReply, HelloRequest, Standing, WatchRequest};

/// The longest time to make a connection, and for the answer to one hello.
const ANSWER: Duration = Duration::from_secs(5);

/// Another part, which runs the same.
pub(super) struct Met {
    pub(super) client: PartsClient<Channel>,
    /// What this part's calls carry.
    pub(super) token: Bytes,
}

/// Makes the description of a connection to `address`: windows and frames for tensors.
pub(super) fn endpoint(peer: Part, address: &str) -> Result<Endpoint, GraphError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"));
    let endpoint = endpoint.map_err(|error| {
        setting("peers", format!("the address {address:?} of part {peer} is no host:port: {error}"))
    })?;
    Ok(endpoint
        .connect_timeout(ANSWER)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_LIMIT)
        .keep_alive_while_idle(true))
}

/// Says hello to a part, again and again until it answers or the time is over.
pub(super) async fn meet(
    state: Arc<State>,
    peer: Part,
    address: String,
    limit: Duration,
    until: Instant,
) -> Result<Met, GraphError> {
    let client = PartsClient::new(endpoint(peer, &address)?.connect_lazy());
    let mut pause = Duration::from_millis(2);
    let mut trouble = "no answer".to_owned();
    loop {
        let request = HelloRequest { caller: Some(state.description()), expected: peer.0 as u32 };
        let mut calling = client.clone();
        let end = until.min(Instant::now() + ANSWER);
        match tokio::time::timeout_at(end, calling.hello(Request::new(request))).await {
            Ok(Ok(reply)) => {
                let token = examine(&state, peer, &address, reply.into_inner())?;
                return Ok(Met { client, token });
            }
            Ok(Err(status)) if status.code() == Code::Aborted => {
                return Err(GraphError::PeerFailed { peer: peer.0, reason: shortened(status.message()) });
            }
            Ok(Err(status)) => trouble = describe(&status),
            Err(_) => trouble = format!("no answer within {ANSWER:?}; the last trouble: {trouble}"),
        }
        state.peers.check_all()?;
        if Instant::now() >= until {
            // The part may have called, have found that it runs something else, and have ended. Before the time is over, that is no
            // reason to end: the caller may be a process of an earlier run, and the right part may come later.
            if let Some(misfit) = state.misfit(peer) {
                return Err(refused(peer, &address, misfit));
            }
            let seconds = limit.as_secs_f64();
            return Err(GraphError::Unreachable { peer: peer.0, address, seconds, reason: trouble });
        }
        tokio::time::sleep_until(until.min(Instant::now() + pause)).await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// Compares what a part said of itself. Returns the token.
fn examine(state: &State, peer: Part, address: &str, reply: HelloReply) -> Result<Bytes, GraphError> {
    let server = reply.server.unwrap_or_default();
    state.compare(&server).map_err(|misfit| refused(peer, address, misfit))?;
    if server.part as usize != peer.0 {
        let reason = format!("part {} answers at {address}, the address of part {peer}", server.part);
        return Err(setting("peers", reason));
    }
    match reply.token.len() {
        16 => Ok(reply.token),
        _ => Err(refused(peer, address, Misfit::Differs("the token".to_owned()))),
    }
}

fn refused(peer: Part, address: &str, misfit: Misfit) -> GraphError {
    let (peer, address) = (peer.0, address.to_owned());
    match misfit {
        Misfit::Version(theirs) => GraphError::Version { peer, address, ours: VERSION, theirs },
        Misfit::Differs(what) => GraphError::Differs { peer, address, what: shortened(&what) },
    }
}

/// Opens the call that shows the state of a part.
pub(super) async fn watch(met: &Met, peer: Part, until: Instant) -> Result<Streaming<Standing>, GraphError> {
    let mut client = met.client.clone();
    let request = Request::new(WatchRequest { token: met.token.clone() });
    let lost = |reason: String| GraphError::PeerLost { peer: peer.0, source: reason.into() };
    match tokio::time::timeout_at(until, client.watch(request)).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(lost(describe(&status))),
        Err(_) => Err(lost("it does not answer any more".to_owned())),
    }
}

/// Follows the state of a part until the part has left, has failed or is lost.
pub(super) async fn follow(state: Arc<State>, peer: Part, mut stream: Streaming<Standing>) {
    loop {
        match stream.message().await {
            Ok(Some(standing)) => {
                let (left, failure) = (standing.left, standing.failure.clone());
                state.others.send_modify(|others| {
                    if let Some(other) = others.get_mut(peer.0) {
                        *other = standing;
                    }
                });
                state.compare_runs(peer);
                state.peers.said_something();
                if let Some(reason) = failure {
                    return state.peers.has_failed(peer, shortened(&reason));
                }
                if left {
                    return state.peers.has_left(peer);
                }
            }
            Ok(None) => {
                return state.peers.is_lost(peer, "its watch ended without a word".to_owned());
            }
            Err(status) => return state.peers.is_lost(peer, describe(&status)),
        }
    }
}
