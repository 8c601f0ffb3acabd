//! Messages arrive whole and in order, also where an end waits for the other.

use super::side::{endpoints, pair, pattern, settings, side};
use crate::endpoint::config::Config;

/// The length of message `index`: from 1 byte to the longest.
fn length(index: usize, most: usize) -> usize {
    (index * 7919) % (most - 1) + 1
}

#[tokio::test]
async fn messages_arrive_whole_and_in_order() {
    let (client, server) = pair(&Config::default(), &settings()).await;
    let most = client.endpoint.max_message() - 1;
    for index in 0..500 {
        client.send(&pattern(length(index, most), index as u64));
        server.send(&pattern(length(index + 1, most), index as u64));
    }
    for (receiver, shift) in [(&server, 0), (&client, 1)] {
        receiver.until("all came", |it| it.messages.len() == 500).await;
        receiver.with(|it| {
            for (index, message) in it.messages.iter().enumerate() {
                assert!(*message == pattern(length(index + shift, most), index as u64), "message {index}");
            }
        });
    }
    let sent = client.endpoint.info().counters();
    assert!(sent.eager_sent >= 500 && sent.rendezvous_sent == 0, "{sent:?}");
}

/// Neither end reads while it sends more than the other has room for. Both still get all.
#[tokio::test]
async fn credits_that_are_used_up_both_ways_come_back() {
    let config = Config::default().receive_slots(16).slot_size(4096);
    let (client, server) = pair(&config, &settings()).await;
    for index in 0..2000_u32 {
        client.queue(&index.to_le_bytes());
        server.queue(&index.to_le_bytes());
    }
    client.endpoint.drive();
    server.endpoint.drive();
    for end in [&client, &server] {
        end.until("all came", |it| it.messages.len() == 2000).await;
        end.with(|it| {
            let numbers: Vec<_> =
                it.messages.iter().map(|it| u32::from_le_bytes(it[..].try_into().unwrap())).collect();
            assert!(numbers.into_iter().eq(0..2000));
        });
    }
}

/// Until an end starts, messages stay in their receive buffers, and the sender waits.
#[tokio::test]
async fn messages_wait_for_the_handler() {
    let config = Config::default().receive_slots(16).slot_size(4096);
    let (client, server) = endpoints(&config).await;
    let client = side(client);
    for index in 0..100_u8 {
        client.send(&[index]);
    }
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert!(client.endpoint.info().counters().eager_sent < 100, "the peer has 16 receive buffers");
    let server = side(server);
    server.until("all came", |it| it.messages.len() == 100).await;
    server.with(|it| assert!(it.messages.iter().map(|it| it[0]).eq(0..100)));
}

#[tokio::test]
async fn a_message_that_is_too_long_ends_the_connection_with_a_reason() {
    let (client, _server) = pair(&Config::default(), &settings()).await;
    client.send(&vec![0; client.endpoint.max_message() + 1]);
    client.until("it ended", |it| it.fault.is_some()).await;
    let fault = client.with(|it| it.fault.clone().unwrap());
    assert!(fault.contains("room for"), "{fault}");
}
