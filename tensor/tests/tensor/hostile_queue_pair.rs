//! A peer that misuses its queue pair harms only its own link.

use tonic_rdma_proto::tensor_device::{Kind, MemoryRange};
use tonic_rdma_tensor::unstable::tensor_frame::{Frame, MAGIC, MAX_FRAME, RequestId, TensorRequest};
use tonic_rdma_tensor::{Dtype, Rights, Shape, TensorSpec};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

use crate::raw_peer::{RawLink, RawPeer, describe};
use crate::{Served, eventually, pair, pattern};

fn at(place: &MemoryRange, offset: u64) -> RemoteSegment {
    RemoteSegment { address: place.address.wrapping_add(offset), rkey: Rkey(place.rkey) }
}

async fn link(served: &Served) -> RawLink {
    RawPeer::new(&served.endpoint).await.link().await
}

async fn ends(what: &str, served: &Served, link: &mut RawLink) {
    link.ended(what).await;
    eventually(what, async || describe(&served.endpoint).await.links.len() == 1).await;
    served.check().await;
}

#[tokio::test]
async fn a_write_without_a_right_ends_the_link() {
    let served = Served::new(pair().await).await;
    let server = &served.server;
    let region = server.export("open", server.allocate(4096).unwrap(), Rights::WRITE).unwrap();
    let read_only = server.export("read only", server.allocate(4096).unwrap(), Rights::READ).unwrap();
    region.memory().copy_in(0, &[5; 4096]).unwrap();
    read_only.memory().copy_in(0, &[5; 4096]).unwrap();
    let first = {
        let mut first = link(&served).await;
        first.attach("open").await
    };
    for case in 0..8 {
        let mut link = link(&served).await;
        let open = link.attach("open").await;
        let guarded = link.attach("read only").await;
        let place = match case {
            0 => at(&open, 4096),
            1 => at(&open, 4096 - 7),
            2 => at(&open, 8_u64.wrapping_neg()),
            3 => at(&guarded, 0),
            4 => at(&link.words, link.words.length - 7),
            5 => RemoteSegment { rkey: Rkey(open.rkey ^ 0x5555), ..at(&open, 0) },
            6 => RemoteSegment { address: u64::MAX - 3, ..at(&open, 0) },
            // The key of a link that has ended.
            _ => at(&first, 0),
        };
        link.write(&[9; 8], place, None);
        ends(&format!("the end of write {case}"), &served, &mut link).await;
    }
    for memory in [region.memory(), read_only.memory()] {
        let mut found = vec![0; 4096];
        memory.copy_out(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 5), "nothing was touched");
    }
    // The peer can write where it has the right.
    let mut link = link(&served).await;
    let open = link.attach("open").await;
    link.write(&[9; 8], at(&open, 4088), None);
    let written = async || {
        let mut found = [0; 8];
        region.memory().copy_out(4088, &mut found).unwrap();
        found == [9; 8]
    };
    eventually("a write that is allowed", written).await;
    assert!(!link.has_ended());
}

#[tokio::test]
async fn a_malformed_frame_ends_the_link() {
    let served = Served::new(pair().await).await;
    for seed in 0..60_u64 {
        let mut link = link(&served).await;
        let length = [0, 1, 3, 15, 16, 17, 400, MAX_FRAME][seed as usize % 8];
        let mut frame = pattern(seed, length);
        if seed >= 30 && length > 16 {
            // The header is a valid frame header.
            frame[..3].copy_from_slice(&MAGIC);
            frame[3] = 1;
            frame[4] = (seed % 13) as u8;
            frame[5..8].fill(0);
            frame[12..16].copy_from_slice(&(length as u32 - 16).to_le_bytes());
        }
        link.send(&frame);
        ends(&format!("the end after frame {seed}"), &served, &mut link).await;
    }
    let mut link = link(&served).await;
    link.send(&[0; MAX_FRAME][..]);
    ends("the end", &served, &mut link).await;
}

fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut buffer = [0; MAX_FRAME];
    let length = frame.encode(16, &mut buffer).unwrap();
    buffer[..length].to_vec()
}

#[tokio::test]
async fn a_frame_at_a_wrong_time_ends_the_link() {
    let served = Served::new(pair().await).await;
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[5000]).unwrap()).unwrap();
    let mut slot = served.server.static_receiver("slot", &spec, 2).unwrap();
    let metadata = slot_metadata(&spec);
    let id = RequestId(77);
    let ending = [
        Frame::Written { request_id: id, checksum: None },
        Frame::Dead { request_id: id },
        Frame::Status { request_id: id, code: 5, text: "no such request".into() },
        Frame::Goodbye,
        Frame::Ended { slot: 12 },
        Frame::Ended { slot: u32::MAX },
    ];
    for frame in ending {
        let mut link = link(&served).await;
        link.send(&encoded(&frame));
        ends(&format!("the end after {frame:?}"), &served, &mut link).await;
    }
    // Immediate data announces the tensor of a request that was never made.
    for number in [0, 77, u32::MAX >> 1] {
        let mut link = link(&served).await;
        let place = at(&link.attach("region").await, 8);
        link.write(&[9; 8], place, Some(1 << 31 | number));
        ends(&format!("the end after immediate data for request {number}"), &served, &mut link).await;
    }
    // Slots that do not exist, and epochs that are not due.
    let mut link = link(&served).await;
    for frame in [
        Frame::Placed { slot: u32::MAX, epoch: 1 },
        Frame::Released { slot: u32::MAX, epoch: u64::MAX },
        Frame::Bell { slot: 12 },
        Frame::Cancel { request_id: id },
        Frame::Credit,
    ] {
        link.send(&encoded(&frame));
    }
    let mut request = link.attach_request("slot", Kind::Static);
    request.metadata = metadata.into();
    let reply = link.peer.client.attach(request).await.unwrap().into_inner();
    assert!(!link.has_ended());
    link.send(&encoded(&Frame::Placed { slot: reply.slot, epoch: reply.epoch + 5 }));
    ends("the end", &served, &mut link).await;
    assert!(slot.try_recv().is_err(), "what was never written does not arrive");
}

/// A peer says by one frame for each queue pair that it has given a region up.
#[tokio::test]
async fn a_region_that_is_given_up_twice_ends_the_link() {
    let served = Served::new(pair().await).await;
    let mut link = link(&served).await;
    let attach = async |link: &mut RawLink| {
        let request = link.attach_request("region", Kind::Region);
        link.peer.client.attach(request).await.unwrap().into_inner().slot
    };
    let slots = [attach(&mut link).await, attach(&mut link).await];
    assert_ne!(slots[0], slots[1], "each has words of its own");
    link.send(&encoded(&Frame::Ended { slot: slots[0] }));
    let again = async || attach(&mut link).await % (1 << 14) == slots[0] && !link.has_ended();
    eventually("the words of the first attachment", again).await;
    link.send(&encoded(&Frame::Ended { slot: slots[0] }));
    ends("the end", &served, &mut link).await;
}

fn slot_metadata(spec: &TensorSpec) -> Vec<u8> {
    let metadata = tonic_rdma_tensor::Metadata::dense(*spec).unwrap();
    tonic_rdma_tensor::unstable::tensor_metadata::WireMetadata::from(metadata).encode().to_vec()
}

/// The number of requests for tensors that never come is limited.
#[tokio::test]
async fn requests_of_a_peer_are_limited() {
    let served = Served::new(pair().await).await;
    let link = link(&served).await;
    for number in 0..20_000_u64 {
        let (request_id, step) = (RequestId(number), number);
        let request =
            TensorRequest { request_id, step, sink: None, checksum_wanted: false, name: "never".into() };
        link.send(&encoded(&Frame::Request(request)));
        if link.has_ended() {
            break;
        }
        if number % 64 == 0 {
            tokio::task::yield_now().await;
        }
    }
    served.check().await;
    let held = served.server.offer_counts();
    assert!(held.requests <= 2048, "{held:?}");
    drop(link);
    eventually("its end", async || served.server.offer_counts().requests == 0).await;
    served.check().await;
}
