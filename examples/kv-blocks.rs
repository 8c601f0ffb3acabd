//! Blocks of a KV cache by reference. A prefill process computes keys and values of prompts, shares them, and
//! publishes the handles in a directory. A decode process asks the directory, and fetches the blocks that it
//! needs, from wherever they are. Prefill may evict a prompt at any time: its reader gets an error that says so.
//! `cargo run --example kv-blocks` is the directory, which starts prefill, which starts decode.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::{collections::HashMap, error::Error, time::Duration};

use tokio::process::Command;
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};
use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::kv::directory_client::DirectoryClient;
use tonic_rdma_proto::kv::directory_server::{Directory, DirectoryServer};
use tonic_rdma_proto::kv::{Entry, FindReply, FindRequest, PublishReply, PublishRequest};
use tonic_rdma_tensor::TensorErrorKind::{Gone, Revoked};
use tonic_rdma_tensor::buffer::{BufferClient, BufferPool, LeaseOptions};

const BLOCK: u64 = 16 << 10; // bytes
const BLOCKS: u64 = 512; // of each prompt
const PROMPTS: [&str; 3] = ["system", "question 1", "question 2"];

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["prefill", directory] => prefill(directory).await,
        ["decode", directory] => decode(directory).await,
        _ => keep_directory().await,
    }
}

async fn prefill(directory: &str) -> Result<()> {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let pool = BufferPool::new(format!("http://{}", incoming.local_addr()))?;
    tokio::spawn(RdmaServer::new().add_service(pool.service()).serve_with_incoming(incoming));
    let share = |prompt: &str, options| -> Result<_> {
        let mut blocks = pool.allocate((BLOCKS * BLOCK) as usize)?;
        (0..).zip(&mut *blocks).for_each(|(at, byte)| *byte = value(prompt, at));
        let (lease, handle) = pool.share_with(blocks.freeze(), options)?;
        Ok((lease, Entry { key: prompt.into(), blocks: Some(handle) }))
    };
    // A prompt is for many readers, and dies of age; a question is for one reader; either may be evicted.
    let old = LeaseOptions::new().time_limit(Duration::from_secs(60));
    let (_system, system) = share(PROMPTS[0], old.clone())?;
    let (first, question) = share(PROMPTS[1], old.clone().readers(1))?;
    let (second, evicted) = share(PROMPTS[2], old.readers(1))?;
    let mut client = DirectoryClient::new(RdmaChannel::connect(directory.to_owned()).await?);
    client.publish(PublishRequest { entries: vec![system, question, evicted] }).await?;
    second.revoke(); // its memory is needed
    run("decode", directory).await?;
    first.ended().await;
    println!("prefill: {:?} has ended, because its one reader has it", PROMPTS[1]);
    Ok(())
}

async fn decode(directory: &str) -> Result<()> {
    let mut client = DirectoryClient::new(RdmaChannel::connect(directory.to_owned()).await?);
    let wanted = PROMPTS.iter().chain(&["nobody's"]).map(|key| key.to_string());
    let found = client.find(FindRequest { keys: wanted.collect() }).await?.into_inner().entries;
    println!("decode: 3 of 4 are in the directory: {}", found.len() == 3);
    let handles: Vec<_> = found.into_iter().filter_map(|entry| entry.blocks).collect();
    // Of the first prompt it has two thirds of the blocks already. One call fetches the others.
    let ranges: Vec<_> = (0..BLOCKS).step_by(3).map(|block| block * BLOCK..(block + 1) * BLOCK).collect();
    let blocks = handles[0].fetch_blocks(&ranges).await?;
    let right = ranges.iter().zip(&blocks).all(|(range, block)| is_right(PROMPTS[0], range.start, block));
    println!("decode: {} scattered blocks of {:?} are right: {right}", blocks.len(), PROMPTS[0]);
    // Of the others it needs all. One call to each owner fetches them.
    for (key, fetched) in PROMPTS[1..].iter().zip(BufferClient::of_runtime().fetch_all(&handles[1..]).await) {
        match fetched {
            Ok(bytes) => println!("decode: all of {key:?} is right: {}", is_right(key, 0, &bytes)),
            Err(it) if matches!(it.kind(), Gone | Revoked) => println!("decode: compute {key:?} again: {it}"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn value(prompt: &str, at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 16) as u8 ^ prompt.as_bytes()[(at % 6) as usize]
}

fn is_right(prompt: &str, from: u64, bytes: &[u8]) -> bool {
    (from..).zip(bytes).all(|(at, byte)| *byte == value(prompt, at))
}

/// The directory knows handles, and no blocks.
#[derive(Default)]
struct Known(Mutex<HashMap<String, Entry>>);

async fn keep_directory() -> Result<()> {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", incoming.local_addr());
    let server = RdmaServer::new().add_service(DirectoryServer::new(Known::default()));
    tokio::spawn(server.serve_with_incoming(incoming));
    run("prefill", &address).await
}

/// Runs this program in another role.
async fn run(role: &str, directory: &str) -> Result<()> {
    let status = Command::new(std::env::current_exe()?).args([role, directory]).status().await?;
    if status.success() { Ok(()) } else { Err(format!("{role} ended with {status}").into()) }
}

#[tonic::async_trait]
impl Directory for Known {
    async fn publish(&self, request: Request<PublishRequest>) -> Result<Response<PublishReply>, Status> {
        let entries = request.into_inner().entries.into_iter().map(|entry| (entry.key.clone(), entry));
        self.0.lock().await.extend(entries);
        Ok(Response::new(PublishReply {}))
    }

    async fn find(&self, request: Request<FindRequest>) -> Result<Response<FindReply>, Status> {
        let known = self.0.lock().await;
        let entries = request.get_ref().keys.iter().filter_map(|key| known.get(key).cloned()).collect();
        Ok(Response::new(FindReply { entries }))
    }
}
