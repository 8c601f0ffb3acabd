//! The services of the server process.

use tokio::sync::mpsc::UnboundedReceiver;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::RdmaIncoming;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tonic_rdma_proto::transfer::transfer_server::TransferServer;
use tonic_rdma_tensor::{BlockCopy, Offer, RdmaDevice, Rights, TensorMut};

use super::content::{check, check_shared, spec, stamp};
use super::path::Path;
use super::services::{Greets, Takes};

/// Bytes of the longest message.
const LIMIT: usize = 64 << 20;

/// Serves without end, or until the client's device ends the tensors. `lines` are the client's lines on standard input.
pub(crate) async fn serve(path: Path, bytes: usize, lines: UnboundedReceiver<String>) {
    let tcp = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_nodelay(Some(true));
    let rdma = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
    let device = RdmaDevice::builder().queue_pairs_per_peer(2).bind("127.0.0.1:0").await.unwrap();
    let addresses = format!("{} {} {}", tcp.local_addr().unwrap(), rdma.local_addr(), device.endpoint());
    let ready = || println!("{addresses}");
    match path {
        Path::GrpcTcp | Path::PutTcp => {
            ready();
            services().serve_with_incoming(tcp).await.unwrap();
        }
        Path::GrpcRdma | Path::Gather | Path::Pool => {
            ready();
            services().serve_with_incoming(rdma).await.unwrap();
        }
        Path::Static => fixed(&device, bytes, 1, ready).await,
        Path::Static2 => fixed(&device, bytes, 2, ready).await,
        Path::Dynamic => dynamic(&device, ready).await,
        Path::Rendezvous => rendezvous(&device, bytes, ready).await,
        Path::Memcpy => {
            let memory = device.allocate(bytes).unwrap();
            let _region = device.export("region", memory, Rights::READ_WRITE).unwrap();
            ready();
            std::future::pending::<()>().await;
        }
        Path::Notice => notice(&device, bytes, lines, ready).await,
    }
}

fn services() -> tonic::transport::server::Router {
    Server::builder()
        .add_service(GreeterServer::new(Greets).max_decoding_message_size(LIMIT))
        .add_service(TransferServer::new(Takes).max_decoding_message_size(LIMIT))
}

async fn fixed(device: &RdmaDevice, bytes: usize, depth: u32, ready: impl Fn()) {
    let mut receiver = device.static_receiver("slot", &spec(bytes), depth).unwrap();
    ready();
    let mut step = 0;
    while let Ok(arrived) = receiver.recv().await {
        let (memory, range) = arrived.memory();
        check_shared(memory, range, step);
        step += 1;
    }
}

async fn dynamic(device: &RdmaDevice, ready: impl Fn()) {
    let mut receiver = device.dynamic_receiver("slot", 2).unwrap();
    ready();
    let mut step = 0;
    while let Ok(tensor) = receiver.recv().await {
        check(tensor.bytes().unwrap(), step);
        step += 1;
    }
}

async fn rendezvous(device: &RdmaDevice, bytes: usize, ready: impl Fn()) {
    let pool = tonic_rdma::memory::Pool::for_sending(1 << 28);
    ready();
    // The number of tensors offered ahead of the client: more than the client takes during tokio's shortest sleep.
    let ahead = if bytes <= 4096 { 512 } else { 32 };
    let mut step = 0;
    loop {
        while device.held().offers < ahead {
            let mut tensor = TensorMut::in_pool(spec(bytes), &pool).unwrap();
            stamp(tensor.bytes_mut(), step);
            device.put("tensor", step, Offer::Tensor(tensor.freeze()), 1).unwrap();
            step += 1;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

/// Answers each notice with a notice.
async fn notice(device: &RdmaDevice, bytes: usize, mut lines: UnboundedReceiver<String>, ready: impl Fn()) {
    let memory = device.allocate(bytes).unwrap();
    let region = device.export("region", memory, Rights::READ_WRITE).unwrap();
    ready();
    let Some(client) = lines.recv().await else { return };
    let channel = device.channel(&client, 0).await.unwrap();
    let remote = channel.region("answers").await.unwrap();
    let block = [BlockCopy { local: 0, remote: 0, length: 8 }];
    let mut answer = device.allocate(8).unwrap();
    let mut step = 0;
    loop {
        let Ok(sent) = channel.write(&remote).notify(true).blocks_from(answer, &block).await else { return };
        answer = sent;
        if region.notice().await.is_err() {
            return;
        }
        check_shared(region.memory(), 0..bytes, step);
        stamp(&mut answer, step);
        step += 1;
    }
}
