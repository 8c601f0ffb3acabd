//! A full port refuses transfers, and accepts them again later.

use std::time::{Duration, Instant};

use super::{Link, Port, lock};
use crate::channel::copy::Memcpy;
use crate::error::TensorErrorKind;
use crate::regions::RemoteRegion;
use crate::wire::tensor_frame::Frame;
use crate::{
    BlockCopy, Channel, Dtype, ExportedRegion, NamedOffer, NamedReply, NamedRequest, Notification,
    RdmaDevice, Rights, Shape, Tensor, TensorSpec,
};

const BYTES: usize = 100_000;

struct Devices {
    server: RdmaDevice,
    client: RdmaDevice,
    exported: ExportedRegion,
    channel: Channel,
    remote: RemoteRegion,
}

impl Devices {
    async fn new() -> Self {
        let device = async || RdmaDevice::bind("127.0.0.1:0").await.unwrap();
        Self::between(device().await, device().await).await
    }

    async fn between(server: RdmaDevice, client: RdmaDevice) -> Self {
        let exported = server.export("region", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
        let channel = client.channel(&server.endpoint(), 0).await.unwrap();
        let remote = channel.region("region").await.unwrap();
        Self { server, client, exported, channel, remote }
    }

    fn write(&self, notify: bool) -> Memcpy {
        let region = self.client.allocate(4096).unwrap();
        self.channel.write(&self.remote).notify(notify).from(region, ..)
    }

    /// Begins as many writes as the port accepts. Nothing polls the queue until the next await.
    fn fill(&self) -> Vec<Memcpy> {
        (0..Port::WAITING).map(|_| self.write(false)).collect()
    }
}

async fn end(writes: Vec<Memcpy>) {
    for write in writes {
        write.await.unwrap();
    }
}

#[tokio::test]
async fn a_refused_tensor_takes_no_buffer_of_the_slot() {
    let devices = Devices::new().await;
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[BYTES as u64]).unwrap()).unwrap();
    let mut slot = devices.server.static_receiver("slot", &spec, 4).unwrap();
    let mut sender = devices.channel.static_sender("slot", &spec).await.unwrap();
    let mut region = devices.client.allocate(BYTES).unwrap();
    region.fill(7);
    let writes = devices.fill();
    let refused = sender.try_send_region(region).try_take().unwrap().unwrap_err();
    assert_eq!(refused.error().kind(), TensorErrorKind::Busy, "{refused}");
    assert_eq!(sender.pending().unwrap(), 0);
    end(writes).await;
    let region = sender.send_region(refused.into_region()).await.unwrap();
    let arrived = tokio::time::timeout(Duration::from_secs(60), slot.recv()).await;
    let arrived = arrived.expect("the receiver waits for the refused tensor").unwrap().to_tensor().unwrap();
    assert!(arrived.bytes().unwrap() == &region[..]);
}

#[tokio::test]
async fn a_refused_write_gives_no_notice() {
    let devices = Devices::new().await;
    let writes = devices.fill();
    let refused = devices.write(true).try_take().unwrap().unwrap_err();
    assert_eq!(refused.error().kind(), TensorErrorKind::Busy, "{refused}");
    end(writes).await;
    let blocks = [BlockCopy { local: 0, remote: 0, length: 4096 }];
    let written =
        devices.channel.write(&devices.remote).notify(true).blocks_from(refused.into_region(), &blocks);
    written.await.unwrap();
    devices.exported.notice().await.unwrap();
    assert!(!devices.exported.try_notice(), "the refused write was counted");
}

/// Returns a request for a tensor that the server has not offered, when the server has `pending` requests.
async fn request(devices: &Devices, step: u64, pending: usize) -> NamedRequest {
    let request = devices.channel.request("loss", step);
    while devices.server.offer_counts().requests != pending {
        tokio::task::yield_now().await;
    }
    request
}

fn offer(devices: &Devices, step: u64) {
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4]).unwrap()).unwrap();
    let tensor = Tensor::copy_from(spec, &[step as u8; 4]).unwrap();
    devices.server.put("loss", step, NamedOffer::Tensor(tensor), 1).unwrap();
}

async fn take(request: NamedRequest, step: u64) {
    let reply = tokio::time::timeout(Duration::from_secs(60), request).await.expect("no answer").unwrap();
    let NamedReply::Tensor(tensor) = reply else { panic!("a dead tensor") };
    assert_eq!(tensor.bytes().unwrap(), [step as u8; 4]);
}

#[tokio::test]
async fn a_named_tensor_that_the_port_refuses_has_an_answer() {
    let devices = Devices::new().await;
    let first = request(&devices, 0, 1).await;
    offer(&devices, 0);
    take(first, 0).await;
    let mut requests = Vec::new();
    let most = Port::WAITING as u64;
    for step in 1..=most + 3 {
        requests.push(request(&devices, step, step as usize).await);
    }
    (1..=most + 3).for_each(|step| offer(&devices, step));
    let mut refused = Vec::new();
    for request in requests {
        let answer = tokio::time::timeout(Duration::from_secs(60), request).await.expect("no answer");
        refused.extend(answer.err().map(|error| error.to_string()));
    }
    assert!((1..=3).contains(&refused.len()), "{refused:?}");
    assert!(refused.iter().all(|error| error.contains("could not be written")), "{refused:?}");
    // The tensor is still there.
    take(devices.channel.request("loss", most + 3), most + 3).await;
}

/// Immediate data without a receive would stop the queue pair. A frame waits for the receive.
#[tokio::test]
async fn a_named_tensor_announces_itself_only_with_a_receive_of_the_peer() {
    let devices = Devices::new().await;
    let first = request(&devices, 0, 1).await;
    offer(&devices, 0);
    take(first, 0).await;
    let [link] = &devices.server.shared.links()[..] else { panic!("another link") };
    assert!(link.announces_named);
    for step in [1, 2] {
        let request = request(&devices, step, 1).await;
        let port = link.port(0);
        // Nothing polls the queues until the next await.
        let bells = if step == 1 { 0 } else { Port::RECEIVES };
        (0..bells).for_each(|_| port.send_frame(&Frame::Bell { slot: 12 }).unwrap());
        let state = || {
            let state = lock(&port.state);
            (state.backlog.len(), state.credits.sent, state.credits.may_send())
        };
        let (waiting, sent, _) = state();
        offer(&devices, step);
        let expected = if step == 1 { (waiting, sent + 1, true) } else { (waiting + 1, sent, false) };
        assert_eq!(state(), expected);
        take(request, step).await;
    }
}

/// Otherwise this side would send frames for which the peer has no receive.
#[tokio::test]
async fn a_write_with_immediate_data_uses_up_a_receive_of_the_peer() {
    let device = || RdmaDevice::builder().notification(Notification::Immediate).bind("127.0.0.1:0");
    let devices = Devices::between(device().await.unwrap(), device().await.unwrap()).await;
    for _ in 0..2 * Port::RECEIVES {
        devices.write(true).await.unwrap();
        devices.exported.notice().await.unwrap();
    }
    let link = &devices.remote.shared.link;
    let state = lock(&link.port(0).state);
    let left = state.credits.peer_posted.wrapping_sub(state.credits.sent);
    assert!(left <= Port::RECEIVES, "{left} receives are left, and the peer has {}", Port::RECEIVES);
}

/// The count of a frame that waits is that of the time when it goes. If it counted as reported before, two
/// sides whose frames wait for one another would never report their receives.
#[tokio::test]
async fn a_frame_that_waits_reports_no_receives_until_it_goes() {
    let devices = Devices::new().await;
    let [server] = &devices.server.shared.links()[..] else { panic!("another link") };
    let client = &devices.remote.shared.link;
    let (here, there) = (server.port(0), client.port(0));
    let bell = |port: &Port| port.send_frame(&Frame::Bell { slot: 12 }).unwrap();
    let waiting = || lock(&here.state).backlog.len();
    let unreported = || {
        let state = lock(&here.state);
        state.credits.posted.wrapping_sub(state.credits.reported)
    };
    // Nothing else polls the queues until the next await.
    let poll = |link: &Link, is_done: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(60);
        while !is_done() {
            assert!(Instant::now() < until, "nothing arrives");
            link.poll(0);
        }
    };
    (0..Port::RECEIVES).for_each(|_| bell(here));
    assert!(waiting() > 0 && unreported() == 0);
    (0..3).for_each(|_| bell(there));
    poll(server, &|| unreported() == 3);
    bell(here);
    assert_eq!(unreported(), 3, "a frame that waits has reported receives");
    // The client reports receives when it has taken enough of the bells.
    let before = lock(&there.state).credits.sent;
    poll(client, &|| lock(&there.state).credits.sent != before);
    poll(server, &|| waiting() == 0);
    let posted = lock(&here.state).credits.posted;
    assert_eq!(unreported(), 0);
    poll(client, &|| lock(&there.state).credits.peer_posted == posted);
}
