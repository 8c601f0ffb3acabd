//! Buffers of a training loop in registered memory: the allocator learns which buffers are sent.
//!
//! `cargo run --example allocation_sites` runs a worker and a parameter server in one process. The worker
//! allocates from a `SiteAllocator` and marks the end of each step. The buffers that the first step sent by
//! reference (as the example `gather` does) are in registered memory in the next steps.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_rdma::gather::GatherRequests;
use tonic_rdma::memory::Pool;
use tonic_rdma::memory::sites::{SiteAllocator, SitePlacement, SiteSettings};
use tonic_rdma::{RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

/// The length of each layer's tensors, in bytes.
const LAYERS: [usize; 3] = [4 << 20, 1 << 20, 256 << 10];

type Client = TransferClient<GatherRequests<Channel>>;

/// A service that takes gradients.
#[derive(Debug)]
struct ParameterServer;

#[tonic::async_trait]
impl Transfer for ParameterServer {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let PutRequest { seed, payload, .. } = request.into_inner();
        let wrong = payload.iter().position(|&byte| byte != gradient(seed as u8));
        let first_mismatch = wrong.map_or(0, |at| at as u64 + 1);
        Ok(Response::new(PutReply { bytes: payload.len() as u64, first_mismatch, ..Default::default() }))
    }
}

/// Returns the gradient of an activation.
fn gradient(activation: u8) -> u8 {
    activation.wrapping_mul(3).wrapping_add(1)
}

/// Runs one step: forward through the layers, then backward. It sends each layer's gradient.
async fn train(
    step: u8,
    sites: &SiteAllocator,
    server: &mut Client,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut activations = Vec::new();
    for length in LAYERS {
        let mut layer = sites.allocate(length);
        layer.fill(step);
        activations.push(layer);
    }
    for (index, layer) in activations.iter().enumerate().rev() {
        // One line allocates for all layers, so each layer has its own site by name.
        let mut tensor = sites.allocate_named(&format!("gradient of layer {index}"), layer.len());
        tensor.iter_mut().zip(layer.iter()).for_each(|(gradient, value)| *gradient = self::gradient(*value));
        let request = PutRequest { seed: step.into(), check: 0, payload: tensor.freeze() };
        let reply = server.put(request).await?.into_inner();
        if (reply.bytes, reply.first_mismatch) != (layer.len() as u64, 0) {
            return Err(format!("layer {index}: byte {} is wrong", reply.first_mismatch).into());
        }
    }
    let mut momentum = sites.allocate(LAYERS.iter().sum());
    momentum.fill(step);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let address = incoming.local_addr();
    let service = TransferServer::new(ParameterServer).max_decoding_message_size(2 * LAYERS[0]);
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let connector = RdmaConnector::new();
    let channel = endpoint.connect_with_connector(connector.clone()).await?;
    let mut server = TransferClient::new(GatherRequests::new(channel));

    let sites = SiteAllocator::new(Pool::for_sending(1 << 30), SiteSettings::default());
    for step in 1..=3 {
        train(step, &sites, &mut server).await?;
        sites.next_iteration();
        if step != 2 {
            println!("after step {step}, {}", sites.report());
        }
    }
    let report = sites.report();
    let registered = report.sites.iter().filter(|site| site.placement == SitePlacement::Registered);
    let (placed, all) =
        registered.fold((0, 0), |(placed, all), site| (placed + site.registered, all + site.buffers));
    println!("{placed} of {all} gradients were in registered memory");
    Ok(())
}
