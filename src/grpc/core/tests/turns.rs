//! Streams take turns: none waits for another.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;

use super::application::Flag;
use super::network::{CorePair, Device};
use crate::grpc::core::{Part, StreamKey};
use crate::grpc::fault::CallFault;
use crate::grpc::frame::{RequestHeaders, ResetCode};

fn open(pair: &mut CorePair) -> StreamKey {
    let head = RequestHeaders { path: "/a.B/C".parse().unwrap(), authority: None, headers: HeaderMap::new() };
    pair.ends[0].core.open(head).unwrap()
}

fn accept(pair: &mut CorePair) -> StreamKey {
    pair.ends[1].core.next_accepted().unwrap().0
}

/// Takes what has arrived. Returns its length.
fn take(pair: &mut CorePair, end: usize, key: StreamKey) -> usize {
    let mut taken = 0;
    while let Poll::Ready(Some(Ok(Part::Data(data) | Part::Message(data)))) =
        pair.ends[end].core.poll_part(key, Some(Waker::noop()))
    {
        taken += data.len();
    }
    pair.transmit(end);
    taken
}

#[test]
fn a_call_whose_reader_stands_still_costs_others_nothing() {
    let messages = |blocked: bool| {
        let mut pair = CorePair::alike();
        pair.settle();
        if blocked {
            let key = open(&mut pair);
            for _ in 0..1000 {
                pair.ends[0].core.send_data(key, vec![1; 10_000].into(), false);
            }
            pair.transmit(0);
            pair.settle();
            accept(&mut pair);
        }
        let before = pair.ends[0].messages + pair.ends[1].messages;
        for _ in 0..50 {
            let key = open(&mut pair);
            pair.ends[0].core.send_data(key, Bytes::from_static(b"request"), true);
            pair.transmit(0);
            pair.settle();
            let accepted = accept(&mut pair);
            assert_eq!(take(&mut pair, 1, accepted), 7);
            let core = &mut pair.ends[1].core;
            core.send_headers(accepted, HeaderMap::new());
            core.send_data(accepted, Bytes::from_static(b"reply"), false);
            core.send_trailers(accepted, HeaderMap::new());
            pair.transmit(1);
            core_release(&mut pair, 1, accepted);
            pair.settle();
            assert!(pair.ends[0].core.poll_headers(key, None).is_ready());
            assert_eq!(take(&mut pair, 0, key), 5);
            core_release(&mut pair, 0, key);
        }
        pair.ends[0].messages + pair.ends[1].messages - before
    };
    // One message each way for each call.
    assert_eq!((messages(false), messages(true)), (100, 100));
}

/// Calls that are made together share messages, also if their requests lie in registered memory. Those that
/// have to be copied do not wait for one another.
#[test]
fn requests_by_reference_share_a_message() {
    let messages = |exposed| {
        let device = Device { exposed, ..Device::default() };
        let limits = (1 << 16, 16 << 10, 1 << 20);
        let mut pair = CorePair::new(0, [limits, limits], [device, Device::default()]);
        pair.settle();
        let before = pair.ends[0].messages;
        for _ in 0..8 {
            let key = open(&mut pair);
            pair.ends[0].core.send_message(key, vec![vec![0; 20].into(), vec![1; 65_536].into()], 20, true);
        }
        pair.transmit(0);
        let messages = pair.ends[0].messages - before;
        pair.settle();
        for _ in 0..8 {
            let accepted = accept(&mut pair);
            pair.ends[1].core.deliver_landed(accepted, 1 << 20);
            take(&mut pair, 1, accepted);
            while pair.land(1) {}
            assert_eq!(take(&mut pair, 1, accepted), 65_556);
        }
        messages
    };
    assert_eq!(messages(100), 1);
    assert!(messages(0) > 1);
}

/// A server that polls a call where it found it sends the reply at once, and what it owes the client goes
/// with the reply.
#[test]
fn the_reply_takes_along_that_the_request_has_landed() {
    let messages = |keeps: bool| {
        let exposed = Device { exposed: 100, ..Device::default() };
        let limits = (1 << 16, 16 << 10, 1 << 20);
        let mut pair = CorePair::new(0, [limits, limits], [exposed, Device::default()]);
        pair.settle();
        let key = open(&mut pair);
        pair.ends[0].core.send_message(key, vec![vec![1; 65_536].into()], 0, true);
        pair.transmit(0);
        while pair.deliver(1) {}
        let accepted = accept(&mut pair);
        pair.ends[1].core.deliver_landed(accepted, 1 << 20);
        assert_eq!(take(&mut pair, 1, accepted), 0);
        assert!(pair.ends[1].core.is_landing(accepted));
        let before = pair.ends[1].messages;
        pair.ends[1].core.keep_taken(keeps);
        assert!(pair.land(1));
        assert_eq!(pair.ends[1].messages - before, usize::from(!keeps));
        pair.ends[1].core.keep_taken(false);
        assert_eq!(pair.ends[0].core.output.offers.len(), 1);
        pair.ends[1].core.send_headers(accepted, HeaderMap::new());
        pair.ends[1].core.send_trailers(accepted, HeaderMap::new());
        assert_eq!(take(&mut pair, 1, accepted), 65_536);
        pair.settle();
        assert!(pair.ends[0].core.output.offers.is_empty(), "the client's memory is free");
        pair.ends[1].messages - before
    };
    assert_eq!((messages(false), messages(true)), (2, 1));
}

fn core_release(pair: &mut CorePair, end: usize, key: StreamKey) {
    pair.ends[end].core.release(key);
    pair.transmit(end);
}

#[test]
fn a_slow_reader_holds_no_more_than_its_window() {
    let mut pair = CorePair::alike();
    pair.settle();
    let key = open(&mut pair);
    for _ in 0..1000 {
        pair.ends[0].core.send_data(key, vec![1; 3000].into(), false);
    }
    pair.transmit(0);
    pair.settle();
    let accepted = accept(&mut pair);
    // Before the first read, only the first window.
    let arrived = take(&mut pair, 1, accepted);
    assert!((50_000..=64 << 10).contains(&arrived), "{arrived} bytes");
    pair.settle();
    let arrived = take(&mut pair, 1, accepted);
    assert!((900_000..=1 << 20).contains(&arrived), "{arrived} bytes");
}

#[test]
fn a_small_call_goes_before_what_is_left_of_large_ones() {
    for device in
        [Device { slots: 1, ..Device::default() }, Device { slots: 1, exposed: 100, ..Device::default() }]
    {
        let limits = (1 << 16, 16 << 10, 1 << 20);
        let mut pair = CorePair::new(0, [limits, limits], [device, Device::default()]);
        pair.settle();
        let large: Vec<_> = (0..20).map(|_| open(&mut pair)).collect();
        for key in large {
            for _ in 0..10 {
                pair.ends[0].core.send_data(key, vec![1; 1 << 20].into(), false);
            }
        }
        pair.transmit(0);
        let small = open(&mut pair);
        pair.ends[0].core.send_data(small, Bytes::from_static(b"small"), true);
        pair.transmit(0);
        let mut delivered = 0;
        let arrived = |pair: &mut CorePair| {
            std::iter::from_fn(|| pair.ends[1].core.next_accepted()).count() > 0
                && pair.ends[1].core.streams.by_number(21).is_some()
        };
        while !arrived(&mut pair) {
            assert!(pair.deliver(1));
            delivered += 1;
        }
        assert!(delivered <= 3, "the small call came with message {delivered}");
    }
}

#[test]
fn calls_that_are_made_together_share_messages() {
    let mut pair = CorePair::alike();
    pair.settle();
    let before = pair.ends[0].messages;
    for _ in 0..32 {
        let key = open(&mut pair);
        pair.ends[0].core.send_data(key, vec![1; 64].into(), true);
    }
    pair.transmit(0);
    assert_eq!(pair.ends[0].messages - before, 1);
}

/// A large call that the peer reset is still in its queue when there is room again. It must not keep the
/// others from their turns.
#[test]
fn a_large_call_that_was_reset_leaves_its_turn_to_the_next() {
    let limits = (1 << 16, 16 << 10, 1 << 20);
    let device = Device { slots: 1, ..Device::default() };
    let mut pair = CorePair::new(0, [limits, limits], [device, Device::default()]);
    pair.settle();
    let keys = [open(&mut pair), open(&mut pair)];
    for key in keys {
        pair.ends[0].core.send_data(key, vec![1; 100].into(), false);
        (0..3).for_each(|_| pair.ends[0].core.send_data(key, vec![1; 40_000].into(), false));
    }
    pair.transmit(0);
    let small = pair.ends[0].sent.pop_front().unwrap();
    pair.receive(1, small).unwrap();
    let (_, second) = (accept(&mut pair), accept(&mut pair));
    assert_eq!(pair.ends[0].core.streams.queues()[1], [keys[1], keys[0]], "the second call is next");
    // The server resets that call. Nothing but its message makes the client transmit.
    pair.ends[1].core.reset(second, ResetCode::Cancel);
    pair.transmit(1);
    let reset = pair.ends[1].sent.pop_back().unwrap();
    pair.receive(0, reset).unwrap();
    pair.transmit(0);
    assert_eq!(pair.ends[0].sent.len(), 1, "the first call has its turn");
}

/// The task of a reader that waits for memory is woken without the connection's lock, also if a command for
/// another call has freed the memory.
#[test]
fn memory_that_a_command_frees_wakes_the_next_reader_after_the_command() {
    type Frees = fn(&mut CorePair, StreamKey);
    let reset: Frees = |pair, key| pair.ends[1].core.reset(key, ResetCode::Cancel);
    let end: Frees = |pair, _| pair.ends[1].core.end(&CallFault::PeerClosed);
    for frees in [reset, end] {
        let limits = [(1 << 16, 16 << 10, 1 << 20); 2];
        let devices = [Device::default(), Device::default()];
        let mut pair = CorePair::with_limit(0, limits, devices, [u64::MAX, 100_000], true);
        pair.settle();
        let waker = Flag::new();
        let [first, second] = [(); 2].map(|()| {
            let key = open(&mut pair);
            pair.ends[0].core.send_message(key, vec![vec![1; 80_000].into()], 5, true);
            pair.transmit(0);
            while pair.deliver(1) {}
            let accepted = accept(&mut pair);
            pair.ends[1].core.deliver_landed(accepted, 1 << 20);
            let part = pair.ends[1].core.poll_part(accepted, Some(&Waker::from(waker.clone())));
            assert!(part.is_pending());
            pair.transmit(1);
            accepted
        });
        assert!(!pair.ends[1].core.is_landing(second), "no memory for both");
        waker.take();
        frees(&mut pair, first);
        assert!(!waker.take(), "woken under the lock");
        pair.ends[1].wake();
        assert!(waker.take(), "not woken");
    }
}
