//! The measuring end of tensors and regions.

use std::hint::black_box;
use std::time::Duration;

use tonic_rdma_tensor::{BlockCopy, Channel, RdmaDevice, Requested, Rights, TensorMut};

use super::client::repeat;
use super::content::{check, check_shared, spec, stamp};
use super::path::Cell;
use super::server::{Addresses, ServerProcess};

async fn device(addresses: &Addresses) -> (RdmaDevice, Channel) {
    let device = RdmaDevice::builder().queue_pairs_per_peer(2).bind("127.0.0.1:0").await.unwrap();
    let channel = device.channel(&addresses.device, 0).await.unwrap();
    (device, channel)
}

pub(crate) async fn fixed(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let (device, channel) = device(addresses).await;
    let mut sender = channel.static_sender("slot", &spec(cell.bytes)).await.unwrap();
    let mut region = Some(device.allocate(cell.bytes).unwrap());
    let micros = repeat(duration, async |step| {
        let mut filled = region.take().unwrap();
        stamp(&mut filled[..cell.bytes], step);
        region = Some(sender.send_region(filled).await.unwrap());
    })
    .await;
    sender.flush().await.unwrap();
    micros
}

pub(crate) async fn dynamic(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let (_device, channel) = device(addresses).await;
    let mut sender = channel.dynamic_sender("slot").await.unwrap();
    let pool = tonic_rdma::memory::Pool::for_sending(1 << 28);
    let micros = repeat(duration, async |step| {
        let mut tensor = TensorMut::in_pool(spec(cell.bytes), &pool).unwrap();
        stamp(tensor.bytes_mut(), step);
        sender.send(&tensor.freeze()).await.unwrap();
    })
    .await;
    sender.flush().await.unwrap();
    micros
}

pub(crate) async fn rendezvous(addresses: &Addresses, duration: Duration) -> f64 {
    let (_device, channel) = device(addresses).await;
    repeat(duration, async |step| {
        let Requested::Tensor(tensor) = channel.request("tensor", step).await.unwrap() else {
            panic!("a dead tensor")
        };
        check(tensor.bytes().unwrap(), step);
        black_box(tensor);
    })
    .await
}

pub(crate) async fn memcpy(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let (device, channel) = device(addresses).await;
    let remote = channel.region("region").await.unwrap();
    let mut region = Some(device.allocate(cell.bytes).unwrap());
    repeat(duration, async |step| {
        let mut filled = region.take().unwrap();
        stamp(&mut filled[..cell.bytes], step);
        region = Some(channel.write(&remote).from(filled, ..cell.bytes).await.unwrap());
    })
    .await
}

pub(crate) async fn notice(cell: Cell, server: &mut ServerProcess, duration: Duration) -> f64 {
    let (device, channel) = device(&server.addresses()).await;
    let answers = device.export("answers", device.allocate(8).unwrap(), Rights::READ_WRITE).unwrap();
    server.tell(&device.endpoint());
    let remote = channel.region("region").await.unwrap();
    let mut region = Some(device.allocate(cell.bytes).unwrap());
    let blocks = blocks(cell.bytes);
    // The server attaches to the answers, and says so by the first of them.
    answers.notice().await.unwrap();
    repeat(duration, async |step| {
        let mut filled = region.take().unwrap();
        stamp(&mut filled[..cell.bytes], step);
        region = Some(channel.write(&remote).notify(true).blocks_from(filled, &blocks).await.unwrap());
        answers.notice().await.unwrap();
        check_shared(answers.memory(), 0..8, step);
    })
    .await
}

/// A region of so many bytes in four blocks, each to where another one was.
fn blocks(bytes: usize) -> Vec<BlockCopy> {
    let length = bytes as u64 / 4;
    let at = |block| block * length;
    // The first and the last stay, so that what is checked does.
    [(0, 0), (1, 2), (2, 1), (3, 3)]
        .map(|(from, to)| BlockCopy { local: at(from), remote: at(to), length })
        .to_vec()
}
