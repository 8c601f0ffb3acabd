//! Decoding reverses encoding, and any bytes are frames or an error.

#![allow(clippy::unwrap_used, reason = "tests")]

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, HeaderName as Name};
use proptest::prelude::*;

use super::headers::{Decoder, Encoder, fields_length};
use super::{
    CallViolation, ContentOffer, FrameHeader, Frames, Kind, Limits, OfferSegment, RequestHeaders, ResetCode,
};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

const TABLE: (u32, u32) = (64, 4096);

fn ends() -> (Encoder, Decoder) {
    let mut encoder = Encoder::default();
    encoder.set_room(TABLE.0, TABLE.1);
    (encoder, Decoder::new(TABLE.0, TABLE.1, 1 << 20))
}

fn fields() -> impl Strategy<Value = HeaderMap> {
    let name = prop_oneof![
        prop::sample::select(vec!["te", "content-type", "grpc-timeout", "x-trace-bin", "authorization"])
            .prop_map(str::to_owned),
        (0..40_u8).prop_map(|number| format!("x-other-{number}")),
    ];
    let value = prop_oneof![
        prop::sample::select(vec![&b"trailers"[..], b"application/grpc", b"", b"1"]).prop_map(<[u8]>::to_vec),
        (prop_oneof![32..127_u8, 128..=255_u8], 0..700_usize).prop_map(|(byte, length)| vec![byte; length]),
    ];
    prop::collection::vec((name, value, any::<bool>()), 0..8).prop_map(|fields| {
        let mut map = HeaderMap::new();
        for (name, value, sensitive) in fields {
            let mut value = HeaderValue::from_bytes(&value).unwrap();
            value.set_sensitive(sensitive);
            map.append(HeaderName::try_from(name).unwrap(), value);
        }
        map
    })
}

fn heads() -> impl Strategy<Value = RequestHeaders> {
    let path = (0..30_u8).prop_map(|number| format!("/a.Service/Method{number}").parse().unwrap());
    let authority = prop::option::of((1..20_u8).prop_map(|port| format!("host:{port}").parse().unwrap()));
    (path, authority, fields()).prop_map(|(path, authority, headers)| RequestHeaders {
        path,
        authority,
        headers,
    })
}

fn offers() -> impl Strategy<Value = ContentOffer> {
    let remote = (0..1_u64 << 40, any::<u32>(), 1..1_u64 << 40).prop_map(|(address, rkey, length)| {
        OfferSegment::Remote { from: RemoteSegment { address, rkey: Rkey(rkey) }, length }
    });
    let inline =
        prop::collection::vec(any::<u8>(), 1..300).prop_map(|bytes| OfferSegment::Inline(bytes.into()));
    let segments = prop::collection::vec(prop_oneof![remote, inline], 1..20);
    (any::<u64>(), segments, any::<u64>()).prop_map(|(id, segments, at)| {
        let total: u64 = segments.iter().map(OfferSegment::length).sum();
        ContentOffer { id, total, aligned_at: at % total, segments }
    })
}

fn decode_offer(payload: &[u8]) -> Result<ContentOffer, CallViolation> {
    let header = FrameHeader::new(Kind::Offer, 1, payload.len());
    let mut frames = Frames::new([&header.encode(), payload].concat().into());
    let (_, payload) = frames.next_frame()?.unwrap();
    ContentOffer::decode(&frames, payload, ContentOffer::SEGMENTS)
}

/// Reads headers with all its fields as new ones.
fn decoded(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    let fields =
        fields.iter().map(|&(name, value)| (Name::from_static(name), HeaderValue::from_static(value)));
    let head = RequestHeaders { path: "/a.B/C".parse().unwrap(), authority: None, headers: fields.collect() };
    let (mut encoder, mut decoder) = ends();
    let mut block = Vec::new();
    encoder.request(&head, &mut block);
    decoder.decode(&block).unwrap().headers
}

#[test]
fn common_fields_need_no_memory_of_their_own() {
    let fields = [("content-type", "application/grpc"), ("te", "trailers"), ("grpc-status", "0")];
    let (one, other) = (decoded(&fields), decoded(&fields));
    for (name, value) in &one {
        assert_eq!(value.as_bytes().as_ptr(), other[name].as_bytes().as_ptr(), "{name}");
    }
    let name =
        |headers: &HeaderMap| headers.keys().find(|name| *name == "grpc-status").unwrap().as_str().as_ptr();
    assert_eq!(name(&one), name(&other));
    let own = [("user-agent", "tonic/0.14")];
    assert_ne!(
        decoded(&own)["user-agent"].as_bytes().as_ptr(),
        decoded(&own)["user-agent"].as_bytes().as_ptr()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Headers that repeat come out as they went in, whatever the table has by then, also when it is full.
    #[test]
    fn decoding_reverses_encoding_of_heads(heads in prop::collection::vec(heads(), 1..12), order in prop::collection::vec(any::<prop::sample::Index>(), 1..30)) {
        let (mut encoder, mut decoder) = ends();
        for index in order {
            let head = index.get(&heads);
            let mut block = Vec::new();
            encoder.request(head, &mut block);
            prop_assert!(block.len() <= head.counted_length());
            let decoded = decoder.decode(&block).unwrap();
            prop_assert_eq!(decoded.path.as_ref(), Some(&head.path));
            prop_assert_eq!(&decoded.authority, &head.authority);
            prop_assert_eq!(&decoded.headers, &head.headers);
            let sensitive = |map: &HeaderMap| map.values().map(HeaderValue::is_sensitive).collect::<Vec<_>>();
            prop_assert_eq!(sensitive(&decoded.headers), sensitive(&head.headers));
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_heads_or_an_error(blocks in prop::collection::vec(prop::collection::vec(prop_oneof![0..10_u8, any::<u8>()], 0..60), 1..6)) {
        let mut decoder = Decoder::new(TABLE.0, TABLE.1, 2000);
        for block in blocks {
            match decoder.decode(&block) {
                Ok(head) => prop_assert!(fields_length(&head.headers) <= 2000),
                Err(_) => break,
            }
        }
    }

    #[test]
    fn decoding_reverses_encoding_of_offers(offer in offers()) {
        let mut payload = Vec::new();
        offer.encode(&mut payload);
        let segments: usize = offer.segments.iter().map(OfferSegment::encoded_length).sum();
        prop_assert_eq!(payload.len(), ContentOffer::PREFIX + segments);
        prop_assert_eq!(decode_offer(&payload), Ok(offer));
    }

    #[test]
    fn any_bytes_are_offers_or_an_error(payload in prop::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(offer) = decode_offer(&payload) {
            let mut again = Vec::new();
            offer.encode(&mut again);
            prop_assert_eq!(again, payload);
        }
    }

    /// A peer of version 3 gets the 20 bytes of version 3.
    #[test]
    fn decoding_reverses_encoding_of_limits(limits in any::<[u32; 5]>(), windows in any::<Option<[u32; 2]>>(), more in prop::collection::vec(any::<u8>(), 0..9)) {
        let [streams, header_bytes, window, table_entries, table_bytes] = limits;
        let limits = Limits { streams, header_bytes, window, table_entries, table_bytes, windows };
        let payload = limits.encode();
        prop_assert_eq!(payload.len(), if windows.is_some() { 28 } else { 20 });
        let has_windows = windows.is_some();
        prop_assert_eq!(Limits::decode(&[&payload[..], &more].concat(), has_windows), Ok(limits));
        prop_assert!(Limits::decode(&payload[1..], has_windows).is_err());
    }

    /// A message of any bytes is a sequence of frames that makes the same bytes again, or an error.
    #[test]
    fn any_bytes_are_frames_or_an_error(parts in prop::collection::vec((0..11_u8, 0..9_u8, any::<u32>(), prop::collection::vec(any::<u8>(), 0..30), 0..20_u32), 0..6)) {
        let mut message = Vec::new();
        for (kind, flags, stream, payload, lie) in parts {
            let length = payload.len() as u32 + u32::from(lie == 0);
            message.extend_from_slice(&[kind, flags, 1, 2]);
            message.extend_from_slice(&stream.to_le_bytes());
            message.extend_from_slice(&length.to_le_bytes());
            message.extend_from_slice(&payload);
        }
        let message = Bytes::from(message);
        let (mut frames, mut again) = (Frames::new(message.clone()), Vec::new());
        loop {
            match frames.next_frame() {
                Ok(Some((header, payload))) => {
                    again.extend_from_slice(&header.encode());
                    again.extend_from_slice(frames.bytes(payload));
                    prop_assert_eq!(&frames.keep(payload, true)[..], frames.bytes(payload));
                    prop_assert_eq!(&frames.keep(payload, false)[..], frames.bytes(payload));
                }
                Ok(None) => {
                    prop_assert_eq!(&again, &message);
                    break;
                }
                Err(_) => {
                    prop_assert!(message.starts_with(&again));
                    break;
                }
            }
        }
    }

    #[test]
    fn reset_codes_keep_their_numbers(code in any::<u16>()) {
        prop_assert_eq!(ResetCode::from_wire(code).to_wire(), code);
    }
}

#[test]
fn a_head_that_repeats_becomes_three_bytes_for_each_field() {
    let (mut encoder, mut decoder) = ends();
    let headers = HeaderMap::from_iter([
        (Name::from_static("te"), HeaderValue::from_static("trailers")),
        (Name::from_static("content-type"), HeaderValue::from_static("application/grpc")),
    ]);
    let head =
        RequestHeaders { path: "/a.B/C".parse().unwrap(), authority: Some("a:1".parse().unwrap()), headers };
    let lengths = [(); 4].map(|()| {
        let mut block = Vec::new();
        encoder.request(&head, &mut block);
        assert_eq!(decoder.decode(&block).unwrap().headers, head.headers);
        block.len()
    });
    assert_eq!(lengths[2..], [12, 12]);
}

#[test]
fn a_sensitive_value_never_enters_a_table() {
    let (mut encoder, mut decoder) = ends();
    let mut secret = HeaderValue::from_static("secret");
    secret.set_sensitive(true);
    let headers = HeaderMap::from_iter([(Name::from_static("authorization"), secret)]);
    for _ in 0..4 {
        let mut block = Vec::new();
        encoder.fields(&headers, &mut block);
        assert!(block.windows(6).any(|bytes| bytes == b"secret"));
        assert!(decoder.decode(&block).unwrap().headers["authorization"].is_sensitive());
    }
}

#[test]
fn a_head_that_was_written_before_is_no_other_head() {
    let (mut encoder, mut decoder) = ends();
    let field = |value: &str| (Name::from_static("key"), HeaderValue::from_str(value).unwrap());
    let head = |path: &str, authority: Option<&str>, values: &[&str]| RequestHeaders {
        path: path.parse().unwrap(),
        authority: authority.map(|authority| authority.parse().unwrap()),
        headers: values.iter().map(|value| field(value)).collect(),
    };
    let heads = [
        head("/a.B/C", Some("a:1"), &["one"]),
        head("/a.B/D", Some("a:1"), &["one"]),
        head("/a.B/C", None, &["one"]),
        head("/a.B/C", Some("b:1"), &["one"]),
        head("/a.B/C", Some("a:1"), &["two"]),
        head("/a.B/C", Some("a:1"), &[]),
    ];
    for _ in 0..5 {
        for head in &heads {
            let mut block = Vec::new();
            encoder.request(head, &mut block);
            let decoded = decoder.decode(&block).unwrap();
            assert_eq!((decoded.path, decoded.authority), (Some(head.path.clone()), head.authority.clone()));
            assert_eq!(decoded.headers, head.headers);
        }
        // The fields of a request, as a response has them.
        let mut block = Vec::new();
        encoder.fields(&heads[0].headers, &mut block);
        assert_eq!(decoder.decode(&block).unwrap().path, None);
    }
    let (name, mut value) = field("one");
    value.set_sensitive(true);
    let secret = HeaderMap::from_iter([(name, value)]);
    let mut block = Vec::new();
    encoder.fields(&secret, &mut block);
    assert!(decoder.decode(&block).unwrap().headers["key"].is_sensitive(), "the same bytes, but sensitive");
}

#[test]
fn a_short_part_does_not_keep_a_long_message() {
    let message = |length: usize| {
        let header = FrameHeader::new(Kind::Data, 1, length).encode();
        let filler = FrameHeader::new(Kind::Data, 2, 8000).encode();
        Bytes::from([&header[..], &vec![1; length], &filler, &vec![2; 8000]].concat())
    };
    let keeps = |length: usize, is_first: bool| {
        let message = message(length);
        let mut frames = Frames::new(message.clone());
        let (_, payload) = frames.next_frame().unwrap().unwrap();
        let kept = frames.keep(payload, is_first);
        assert_eq!(kept.len(), length);
        message.as_ptr_range().contains(&kept.as_ptr())
    };
    assert!(!keeps(100, true) && keeps(4000, true) && !keeps(4000, false) && keeps(16_000, false));
}
