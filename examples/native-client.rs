//! A client of native calls: gRPC without HTTP/2 to a server that knows them, such as `native-server`, and
//! with HTTP/2 to all others.
//!
//! `cargo run --example native-client -- 127.0.0.1:50051 1000` makes a thousand calls and prints the time of
//! a call.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::time::Instant;

use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_rdma::RdmaChannel;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".into());
    let calls = std::env::args().nth(2).map_or(Ok(1), |calls| calls.parse::<u32>())?;

    let channel = RdmaChannel::connect(format!("http://{address}")).await?; // was: Endpoint's connect()
    let mut client = HealthClient::new(channel.clone());

    let reply = client.check(HealthCheckRequest::default()).await?;
    println!("{:?}", reply.into_inner().status());
    if let Some(info) = channel.last_connection() {
        println!("over {}, native: {}, because {}", info.verdict(), info.is_native(), info.reason());
    }
    if calls > 1 {
        let start = Instant::now();
        for _ in 0..calls {
            client.check(HealthCheckRequest::default()).await?;
        }
        println!("a call took {:.1?}, the mean of {calls}", start.elapsed() / calls);
    }
    Ok(())
}
