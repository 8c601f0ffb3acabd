//! One channel over three servers. One of them shuts down, gets no calls, starts again, and gets calls again.
//! No call fails, although the program does not tell the channel of the shutdown.
//!
//! `cargo run --example balance` runs client and servers in one process.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_rdma::{BalancedChannel, EndpointState, RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

/// A service that answers with its name.
#[derive(Debug)]
struct Named(&'static str);

#[tonic::async_trait]
impl Greeter for Named {
    async fn say_hello(&self, _: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        Ok(Response::new(HelloReply { message: self.0.into() }))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut servers = Vec::new();
    for name in ["anna", "berta", "clara"] {
        servers.push(RunningServer::start(name, "127.0.0.1:0").await?);
    }
    let endpoints: Result<Vec<Endpoint>, _> =
        servers.iter().map(|server| Endpoint::from_shared(format!("http://{}", server.address))).collect();
    let channel = BalancedChannel::from_list(endpoints?, RdmaConnector::new());
    let mut client = GreeterClient::new(channel.clone()); // as with any other channel

    wait_for(&channel, 3).await?;
    println!("three are up:   {:?} were called", names(&mut client).await?);

    let RunningServer { name, address, stop, server } = servers.remove(1);
    stop.send(()).map_err(|()| "the server has ended by itself")?;
    server.await??;
    wait_for(&channel, 2).await?;
    println!("berta is away:  {:?} were called", names(&mut client).await?);

    servers.push(RunningServer::start(name, &address).await?);
    wait_for(&channel, 3).await?;
    println!("berta is back:  {:?} were called", names(&mut client).await?);
    Ok(())
}

/// Makes a hundred calls, and returns the number of answers of each server.
async fn names(client: &mut GreeterClient<BalancedChannel>) -> Result<Vec<String>, Status> {
    let mut answers: BTreeMap<String, u32> = BTreeMap::new();
    for _ in 0..100 {
        let reply = client.say_hello(HelloRequest { name: "you".into() }).await?;
        *answers.entry(reply.into_inner().message).or_default() += 1;
    }
    Ok(answers.into_keys().collect())
}

/// Waits until this number of endpoints is up. Calls need not wait: they go to the endpoints that are up.
async fn wait_for(channel: &BalancedChannel, count: usize) -> Result<(), Box<dyn Error>> {
    for _ in 0..1000 {
        let endpoints = channel.endpoints();
        if endpoints.iter().filter(|it| matches!(it.state, EndpointState::Up(_))).count() == count {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err(format!("not {count} of these are up: {channel:?}").into())
}

struct RunningServer {
    name: &'static str,
    address: String,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl RunningServer {
    async fn start(name: &'static str, address: &str) -> Result<Self, Box<dyn Error>> {
        let incoming = RdmaIncoming::bind(address).await?;
        let address = incoming.local_addr().to_string();
        let (stop, stopped) = oneshot::channel();
        let router = Server::builder().add_service(GreeterServer::new(Named(name)));
        let server = tokio::spawn(router.serve_with_incoming_shutdown(incoming, async {
            let _ = stopped.await;
        }));
        Ok(Self { name, address, stop, server })
    }
}
