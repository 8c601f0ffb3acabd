//! Images by reference. A client keeps its pixels, and sends a handle to a gateway. The gateway passes the
//! handle on to a worker, which fetches the rows that it needs from the client's memory. No pixel passes
//! through the gateway.
//!
//! `cargo run --example image-service` is the client, which starts gateway and worker as processes.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tonic::{Request, Response, Status};
use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::image::images_client::ImagesClient;
use tonic_rdma_proto::image::images_server::{Images, ImagesServer};
use tonic_rdma_proto::image::{Image, ThumbnailReply, ThumbnailRequest};
use tonic_rdma_tensor::buffer::{BufferClient, BufferPool};

const SIDE: u64 = 4096;
const STEP: u64 = 16;

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;
type Reply = Result<Response<ThumbnailReply>, Status>;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["worker"] => serve(Worker).await,
        ["gateway", worker] => serve(Gateway { worker: connect(worker).await? }).await,
        _ => call().await,
    }
}

/// The client: owner of the image.
async fn call() -> Result<()> {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let pool = BufferPool::new(format!("http://{}", incoming.local_addr()))?;
    tokio::spawn(RdmaServer::new().add_service(pool.service()).serve_with_incoming(incoming));
    let (_worker, address) = start(&["worker"]).await?;
    let (_gateway, address) = start(&["gateway", &address]).await?;
    let mut gateway = connect(&address).await?;

    let mut pixels = pool.allocate((SIDE * SIDE) as usize)?; // where devices read it without a copy
    (0..).zip(&mut *pixels).for_each(|(at, byte)| *byte = pixel(at % SIDE, at / SIDE));
    let (lease, handle) = pool.share(pixels.freeze())?;
    let image = Image { name: "hills".into(), width: SIDE, height: SIDE, pixels: Some(handle) };
    let request = ThumbnailRequest { image: Some(image), step: STEP };
    let reply = gateway.thumbnail(request.clone()).await?.into_inner();
    let small = SIDE / STEP;
    let expected = (0..small * small).map(|at| pixel(at % small * STEP, at / small * STEP));
    if !expected.eq(reply.pixels) {
        return Err("the thumbnail has other pixels than the image".into());
    }
    println!("a thumbnail of {small} × {small} pixels, as computed here");
    println!("{} of {} bytes were fetched, by {}", reply.fetched, SIDE * SIDE, reply.path);
    drop(lease);
    let status = gateway.thumbnail(request).await.err().ok_or("an image without a lease was read")?;
    println!("after the lease: {}", status.message());
    Ok(())
}

fn pixel(x: u64, y: u64) -> u8 {
    (x * x / 97 + y * 31 + x * y % 251) as u8
}

/// Passes requests on. A handle is a field like any other.
struct Gateway {
    worker: ImagesClient<RdmaChannel>,
}

#[tonic::async_trait]
impl Images for Gateway {
    async fn thumbnail(&self, request: Request<ThumbnailRequest>) -> Reply {
        self.worker.clone().thumbnail(request.into_inner()).await
    }
}

struct Worker;

#[tonic::async_trait]
impl Images for Worker {
    async fn thumbnail(&self, request: Request<ThumbnailRequest>) -> Reply {
        let ThumbnailRequest { image, step } = request.into_inner();
        let Image { width, height, pixels, .. } = image.unwrap_or_default();
        let pixels = pixels.unwrap_or_default();
        if step == 0 || height > 1 << 16 || width.checked_mul(height) != Some(pixels.length) {
            return Err(Status::invalid_argument("the pixels don't fit the image"));
        }
        let step = step as usize;
        let rows: Vec<_> = (0..height).step_by(step).map(|row| row * width..(row + 1) * width).collect();
        let rows =
            pixels.fetch_blocks(&rows).await.map_err(|it| Status::failed_precondition(it.to_string()))?;
        let fetched = rows.len() as u64 * width;
        let pixels = rows.iter().flat_map(|row| row.iter().step_by(step)).copied().collect();
        let mut connections = BufferClient::of_runtime().owners().into_iter().filter_map(|it| it.connection);
        let path = if connections.all(|info| info.is_native()) { "a device" } else { "a stream" }.into();
        Ok(Response::new(ThumbnailReply { pixels, fetched, path }))
    }
}

async fn connect(address: &str) -> Result<ImagesClient<RdmaChannel>> {
    Ok(ImagesClient::new(RdmaChannel::connect(format!("http://{address}")).await?))
}

async fn serve(service: impl Images) -> Result<()> {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    println!("{}", incoming.local_addr());
    Ok(RdmaServer::new().add_service(ImagesServer::new(service)).serve_with_incoming(incoming).await?)
}

/// Starts this program in another role, and returns the address that it prints.
async fn start(role: &[&str]) -> Result<(Child, String)> {
    let mut command = Command::new(std::env::current_exe()?);
    let mut child = command.args(role).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let lines = child.stdout.take().map(BufReader::new).ok_or("the process has no output")?;
    let address = lines.lines().next_line().await?.ok_or("the process printed no address")?;
    Ok((child, address))
}
