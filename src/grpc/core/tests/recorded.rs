//! The messages of native calls of version 3, as its last binary sent them. Both ends of today send the same to
//! a peer of version 3, and understand them. `cargo test -p tonic-rdma --lib recorded::print -- --ignored
//! --nocapture` prints the messages of this binary.

#![allow(clippy::print_stdout, reason = "a test prints what is recorded")]

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use support::hex;

use super::network::{CorePair, Device};
use crate::grpc::core::Part;
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{RequestHeaders, ResetCode};

/// Carries out some calls, and returns the messages of both ends.
fn exchange() -> String {
    let device = Device { exposed: 100, ..Device::default() };
    let limits = (100, 16 << 10, 512);
    let mut pair = CorePair::with_limit(0, [limits, limits], [device.clone(), device], [256 << 20; 2], false);
    let mut sent = String::new();
    let mut settle = |pair: &mut CorePair| {
        while pair.ends.iter().any(|end| !end.sent.is_empty() || !end.fetches.is_empty()) {
            for end in [0, 1] {
                if let Some(message) = pair.ends[1 - end].sent.front() {
                    sent += &format!("\n{}{}", ["client", "server"][1 - end], hex(message));
                }
                pair.deliver(end);
                pair.land(end);
            }
        }
    };
    let fields = |name: &'static str, value| {
        HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_static(value))])
    };
    let take = |pair: &mut CorePair, end: usize, key| {
        let mut taken = Vec::new();
        while let Poll::Ready(Some(Ok(Part::Data(data) | Part::Message(data)))) =
            pair.ends[end].core.poll_part(key, Some(Waker::noop()))
        {
            taken.extend_from_slice(&data);
        }
        pair.transmit(end);
        taken
    };
    settle(&mut pair);
    let long = Bytes::from(vec![7; 40_000]);
    for (request, reply) in
        [(Bytes::from_static(b"request"), Bytes::from_static(b"reply")), (long.clone(), long)]
    {
        let is_long = request.len() > 100;
        let head = RequestHeaders {
            path: "/tonic_rdma.test.Echo/Call".parse().unwrap(),
            authority: Some("server:7000".parse().unwrap()),
            headers: fields("content-type", "application/grpc"),
        };
        let key = pair.ends[0].core.open(head).unwrap();
        if is_long {
            pair.ends[0].core.send_message(key, vec![request.clone()], 0, true);
        } else {
            pair.ends[0].core.send_data(key, request.clone(), true);
        }
        pair.transmit(0);
        settle(&mut pair);
        let (accepted, head) = pair.ends[1].core.next_accepted().unwrap();
        assert_eq!(head.path.path(), "/tonic_rdma.test.Echo/Call");
        assert_eq!(head.headers, fields("content-type", "application/grpc"));
        pair.ends[1].core.deliver_landed(accepted, 1 << 20);
        let mut received = take(&mut pair, 1, accepted);
        settle(&mut pair);
        received.extend(take(&mut pair, 1, accepted));
        assert_eq!(received, request);
        pair.ends[1].core.send_headers(accepted, fields("content-type", "application/grpc"));
        if is_long {
            pair.ends[1].core.send_message(accepted, vec![reply.clone()], 0, false);
        } else {
            pair.ends[1].core.send_data(accepted, reply.clone(), false);
        }
        pair.ends[1].core.send_trailers(accepted, fields("grpc-status", "0"));
        pair.transmit(1);
        settle(&mut pair);
        let Poll::Ready(Ok(head)) = pair.ends[0].core.poll_headers(key, None) else { panic!("no headers") };
        assert_eq!(head, fields("content-type", "application/grpc"));
        pair.ends[0].core.deliver_landed(key, 1 << 20);
        let mut received = take(&mut pair, 0, key);
        settle(&mut pair);
        received.extend(take(&mut pair, 0, key));
        assert_eq!(received, reply);
        for (end, key) in [(1, accepted), (0, key)] {
            pair.ends[end].core.release(key);
            pair.transmit(end);
        }
        settle(&mut pair);
    }
    // A body that is read gives credit back, and the reader of another one goes away.
    let head =
        || RequestHeaders { path: "/a.B/C".parse().unwrap(), authority: None, headers: HeaderMap::new() };
    let key = pair.ends[0].core.open(head()).unwrap();
    for _ in 0..2 {
        pair.ends[0].core.send_data(key, Bytes::from_static(&[9; 100]), false);
        pair.transmit(0);
        settle(&mut pair);
    }
    let (accepted, _) = pair.ends[1].core.next_accepted().unwrap();
    assert_eq!(take(&mut pair, 1, accepted), [9; 200]);
    settle(&mut pair);
    pair.ends[0].core.reset(key, ResetCode::Cancel);
    pair.transmit(0);
    settle(&mut pair);
    let Poll::Ready(Some(Err(fault))) = pair.ends[1].core.poll_part(accepted, Some(Waker::noop())) else {
        panic!("no fault")
    };
    assert_eq!(fault, CallFault::Reset(ResetCode::Cancel));
    pair.ends[1].core.go_away("the server ends");
    pair.transmit(1);
    settle(&mut pair);
    assert_eq!(pair.ends[0].core.going_away().as_deref(), Some("the server ends"));
    sent
}

#[test]
#[ignore = "prints the messages of this binary"]
fn print() {
    println!("{}", exchange());
}

#[test]
fn a_peer_of_version_3_gets_what_it_knows() {
    assert_eq!(exchange(), VERSION_3);
}

const VERSION_3: &str = "
server
0100000000000000140000006400000000400000000200000004000000000100
client
0100000000000000140000006400000000400000000200000004000000000100
client
02000000010000004e000000021a002f746f6e69635f72646d612e746573742e
4563686f2f43616c6c040b007365727665723a37303030060c00636f6e74656e
742d74797065100000006170706c69636174696f6e2f67727063030100000100
00000700000072657175657374
server
020000000100000023000000060c00636f6e74656e742d747970651000000061
70706c69636174696f6e2f677270630300000001000000050000007265706c79
060000000100000013000000060b00677270632d7374617475730100000030
client
02000000020000001d000000000000000100080200100000006170706c696361
74696f6e2f6772706304050000020000002d0000000000000000000000409c00
0000000000000000000000000001e80300000000000007000000409c00000000
0000
server
0500000000000000080000000000000000000000
server
020000000200000017000000080000100000006170706c69636174696f6e2f67
72706304040000020000002d0000000000000000000000409c00000000000000
0000000000000001e80300000000000007000000409c00000000000006000000
02000000080000000801000100000030
client
0500000000000000080000000000000000000000
client
0200000003000000090000000206002f612e422f430300000003000000640000
0009090909090909090909090909090909090909090909090909090909090909
0909090909090909090909090909090909090909090909090909090909090909
0909090909090909090909090909090909090909090909090909090909090909
0909090909
client
0300000003000000640000000909090909090909090909090909090909090909
0909090909090909090909090909090909090909090909090909090909090909
0909090909090909090909090909090909090909090909090909090909090909
09090909090909090909090909090909
server
0800000003000000080000006401000000000000080000000300000008000000
6401000000000000
client
070001000300000000000000
server
09000000030000000f0000007468652073657276657220656e6473";
