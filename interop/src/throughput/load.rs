//! The client of one run: tonic's own, over its own TCP.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use super::options::LoadOptions;
use crate::content::Content;
use crate::output;
use crate::proto::testing::test_service_client::TestServiceClient;
use crate::proto::testing::{Payload, SimpleRequest};
use tonic_rdma_commands::Failure;

/// Time of the warm-up, as a fraction of the measured time.
const WARM_UP: f64 = 0.2;

/// Makes calls for `throughput`, and prints the calls per second.
pub(crate) fn call(options: &LoadOptions) -> Result<(), Failure> {
    let runtime = crate::runtime::start(&mut tokio::runtime::Builder::new_current_thread())?;
    let rate = LocalSet::new().block_on(&runtime, measure(*options))?;
    output::line(&format!("{rate:.1}"))
}

/// Measures the calls per second after a warm-up.
async fn measure(options: LoadOptions) -> Result<f64, Failure> {
    let address = format!("http://127.0.0.1:{}", options.port);
    let endpoint = Endpoint::from_shared(address).map_err(|error| Failure::run(error.to_string()))?;
    // tonic sets nodelay by default.
    let connected = endpoint.connect().await;
    let channel = connected
        .map_err(|error| Failure::run(format!("can't connect to port {}: {error}", options.port)))?;
    let done = Rc::new(Cell::new(0u64));
    let started = Instant::now();
    let warm = started + options.seconds.mul_f64(WARM_UP);
    let end = warm + options.seconds;
    let mut tasks = JoinSet::new();
    for _ in 0..options.inflight {
        tasks.spawn_local(calls(TestServiceClient::new(channel.clone()), options.bytes, done.clone(), end));
    }
    tokio::time::sleep_until(warm).await;
    let (before, begun) = (done.get(), Instant::now());
    tokio::time::sleep_until(end).await;
    let (after, taken) = (done.get(), begun.elapsed());
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| Failure::run(format!("a task ended: {error}")))??;
    }
    if taken < Duration::from_millis(1) || after == before {
        return Err(Failure::run("no call came back in the time measured"));
    }
    Ok((after - before) as f64 / taken.as_secs_f64())
}

/// Makes one call after the other.
async fn calls(
    client: TestServiceClient<Channel>,
    bytes: u32,
    done: Rc<Cell<u64>>,
    end: Instant,
) -> Result<(), Failure> {
    let mut client = client.max_decoding_message_size(32 << 20).max_encoding_message_size(32 << 20);
    let payload = Payload { body: Content::new(1).bytes(bytes as usize), ..Default::default() };
    let request = SimpleRequest { response_size: bytes as i32, payload: Some(payload), ..Default::default() };
    while Instant::now() < end {
        let reply = client.unary_call(request.clone()).await;
        let reply = reply.map_err(|status| Failure::run(format!("a call failed: {status}")))?;
        let found = reply.into_inner().payload.unwrap_or_default().body.len();
        if found != bytes as usize {
            return Err(Failure::run(format!("expected {bytes} bytes, found {found}")));
        }
        done.set(done.get() + 1);
    }
    Ok(())
}
