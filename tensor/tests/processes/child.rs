//! The roles of the process that the test kills.

use std::time::Duration;

use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::{
    BlockCopy, Channel, NamedOffer, RdmaDevice, RemoteRegion, Rights, TensorError, TensorErrorKind, TensorMut,
};

use crate::{LARGE, RegionCopy, buffers, content, device, spec, tensor};
use support::{ROLE, Runtime, announce};

/// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["receive"] => Runtime::Idle.run_for_ever(receive()),
        ["send", what, endpoint] => Runtime::Idle.run_for_ever(send(what, endpoint)),
        ["own", over, address, first] => {
            Runtime::MultiThread.run_for_ever(buffers::own(over, address, first.parse().unwrap()));
        }
        ["read"] => Runtime::MultiThread.run_for_ever(buffers::read()),
        ["read-on", handle] => Runtime::MultiThread.run_for_ever(buffers::read_on(handle)),
        ["rush", endpoint, seed] => Runtime::Idle.run_for_ever(rush(endpoint, seed.parse().unwrap())),
        _ => panic!("unknown role {role}"),
    }
}

/// Exports memory, offers tensors and slots, and receives from some of the slots only.
async fn receive() {
    let device = device().await;
    let region = device.allocate(LARGE).unwrap();
    let _region = device.export("region", region, Rights::READ_WRITE).unwrap();
    let _idle = device.static_receiver("not taken", &spec(100), 1).unwrap();
    let _unread = device.dynamic_receiver("not read", 4).unwrap();
    let mut large = device.static_receiver("large", &spec(LARGE), 1).unwrap();
    let mut dynamic = device.dynamic_receiver("dynamic", 2).unwrap();
    for step in 0..4 {
        device.put("weights", step, NamedOffer::Tensor(tensor(step, LARGE)), 1).unwrap();
    }
    announce(device.endpoint());
    let take = async {
        loop {
            large.recv().await.unwrap();
        }
    };
    let read = async {
        loop {
            drop(dynamic.recv().await.unwrap());
        }
    };
    tokio::join!(take, read);
}

/// Repeats one operation on the device at `endpoint`.
async fn send(what: &str, endpoint: &str) {
    let device = device().await;
    let channel = device.channel(endpoint, 0).await.unwrap();
    announce(device.endpoint());
    match what {
        "write" => copy(&device, &channel, RegionCopy::Write).await,
        "read" => copy(&device, &channel, RegionCopy::Read).await,
        "batch" => batch(&device, &channel).await,
        "small" => stream(&channel, "slot", 100).await,
        "large" => stream(&channel, "slot", LARGE).await,
        "announcements" => announcements(&channel).await,
        "offers" => offers(&device).await,
        "requests" => requests(&channel).await,
        other => panic!("unknown {other}"),
    }
}

async fn region(channel: &Channel) -> RemoteRegion {
    channel.region("region").await.unwrap()
}

async fn copy(device: &RdmaDevice, channel: &Channel, copy: RegionCopy) {
    let remote = region(channel).await;
    let mut local = device.allocate(LARGE).unwrap();
    loop {
        local = copy.start(channel, &remote, local).await.unwrap();
    }
}

async fn batch(device: &RdmaDevice, channel: &Channel) {
    let remote = region(channel).await;
    let mut local = device.allocate(LARGE).unwrap();
    let blocks: Vec<_> = (0..4096)
        .rev()
        .map(|index| BlockCopy { local: index * 4096, remote: index * 4096, length: 1000 })
        .collect();
    loop {
        local = channel.write(&remote).notify(true).blocks_from(local, &blocks).await.unwrap();
    }
}

/// Attaches as soon as possible. The receiver may not have noticed the death of the last sender yet.
async fn attached<T>(attach: impl AsyncFn() -> Result<T, TensorError>) -> T {
    loop {
        match attach().await {
            Ok(sender) => return sender,
            Err(error) if error.kind() == TensorErrorKind::Refused => {
                tokio::time::sleep(Duration::from_micros(300)).await
            }
            Err(error) => panic!("{error}"),
        }
    }
}

async fn stream(channel: &Channel, slot: &str, length: usize) {
    let mut sender = attached(async || channel.static_sender(slot, &spec(length)).await).await;
    for seed in 0.. {
        sender.send_bytes(&content(seed, length)).await.unwrap();
    }
}

async fn announcements(channel: &Channel) {
    let mut sender = attached(async || channel.dynamic_sender("dynamic").await).await;
    let pool = Pool::for_sending(4 * LARGE as u64);
    let mut tensor = TensorMut::in_pool(spec(LARGE), &pool).unwrap();
    tensor.bytes_mut().copy_from_slice(&content(1, LARGE));
    let tensor = tensor.freeze();
    loop {
        sender.send(&tensor).await.unwrap();
    }
}

/// Offers some tensors. The parent requests these and others that never come.
async fn offers(device: &RdmaDevice) {
    for step in 0..4 {
        device.put("weights", step, NamedOffer::Tensor(tensor(step, LARGE)), 1).unwrap();
    }
    std::future::pending().await
}

async fn requests(channel: &Channel) {
    let never = channel.request("never", 0);
    for step in 0.. {
        channel.request("weights", step).await.unwrap();
    }
    never.await.unwrap();
}

/// Attaches to the slot as soon as possible, and sends without a pause. The upper half of a seed is the
/// number of the process, the lower half the number of the tensor.
async fn rush(endpoint: &str, process: u64) {
    let length = 300_001;
    let device = device().await;
    announce("here");
    let sender = async || device.channel(endpoint, 0).await?.static_sender("slot", &spec(length)).await;
    let mut sender = attached(sender).await;
    for number in 0.. {
        sender.send_bytes(&content(process << 32 | number, length)).await.unwrap();
    }
}
