use proptest::prelude::*;

use super::*;
use crate::wire::tensor_metadata::{MetadataError, WireLayout, WireMetadata, WireShape};

/// A frame that owns its text.
#[derive(Clone, Debug)]
struct Sample {
    kind: usize,
    numbers: [u64; 3],
    words: [u32; 2],
    flags: [bool; 2],
    metadata: WireMetadata,
    text: String,
}

impl Sample {
    fn frame(&self) -> Frame<'_> {
        let [first, step, length] = self.numbers;
        let (request_id, [slot, rkey], metadata) = (RequestId(first), self.words, self.metadata);
        let start = RemoteSegment { address: !first, rkey: Rkey(rkey) };
        let sink = TensorMemory { metadata, place: RemoteRange { start, length } };
        match self.kind {
            0 => Frame::Credit,
            1 => Frame::Bell { slot },
            2 => Frame::Placed { slot, epoch: step },
            3 => Frame::Released { slot, epoch: step },
            4 => Frame::Request(TensorRequest {
                request_id,
                step,
                sink: self.flags[0].then_some(sink),
                checksum_wanted: self.flags[1],
                name: (&*self.text).into(),
            }),
            5 => Frame::Metadata { request_id, metadata },
            6 => Frame::Written { request_id, checksum: self.flags[0].then_some(length) },
            7 => Frame::Status { request_id, code: 1 + slot % 16, text: (&*self.text).into() },
            8 => Frame::Dead { request_id },
            9 => Frame::Cancel { request_id },
            10 => Frame::Ended { slot },
            _ => Frame::Goodbye,
        }
    }
}

fn samples() -> impl Strategy<Value = Sample> {
    let metadata = (any::<u16>(), any::<bool>(), prop::collection::vec(any::<u64>(), 0..=16), any::<u64>());
    let metadata = metadata.prop_map(|(dtype, dense, lengths, bytes)| {
        let layout = if dense { WireLayout::Dense } else { WireLayout::Serialized };
        WireMetadata { dtype, layout, shape: WireShape::new(&lengths).unwrap(), bytes }
    });
    let text = prop_oneof!["[a-zä/:]{1,40}", Just("n".repeat(MAX_NAME)), "[ä]{512}"];
    (0..12_usize, any::<[u64; 3]>(), any::<[u32; 2]>(), any::<[bool; 2]>(), metadata, text).prop_map(
        |(kind, numbers, words, flags, metadata, text)| Sample {
            kind,
            numbers,
            words,
            flags,
            metadata,
            text,
        },
    )
}

fn encoded(frame: Frame<'_>, granted: u32) -> Vec<u8> {
    let mut buffer = [0xee; MAX_FRAME];
    let length = frame.encode(granted, &mut buffer).unwrap();
    buffer[..length].to_vec()
}

fn request(name: &str, sink: Option<TensorMemory>) -> Frame<'_> {
    let name = name.into();
    Frame::Request(TensorRequest { request_id: RequestId(7), step: 3, sink, checksum_wanted: true, name })
}

fn sink() -> TensorMemory {
    let shape = WireShape::new(&[2, 3]).unwrap();
    let metadata = WireMetadata { dtype: 1, layout: WireLayout::Dense, shape, bytes: 24 };
    let start = RemoteSegment { address: 4096, rkey: Rkey(5) };
    TensorMemory { metadata, place: RemoteRange { start, length: 24 } }
}

/// Checks that bytes which can be decoded encode to equal bytes. A name that this side may not write is an
/// exception.
fn is_a_frame_or_an_error(bytes: &[u8]) {
    let Ok(Decoded { granted, frame }) = Frame::decode(bytes) else { return };
    match &frame {
        Frame::Request(TensorRequest { name, .. }) if name.is_empty() || name.len() > MAX_NAME => {}
        _ => assert_eq!(encoded(frame, granted), bytes),
    }
}

proptest! {
    #[test]
    fn a_frame_is_decoded_as_it_was_encoded(sample in samples(), granted in any::<u32>()) {
        let bytes = encoded(sample.frame(), granted);
        prop_assert!(bytes.len() <= MAX_FRAME);
        prop_assert_eq!(Frame::decode(&bytes), Ok(Decoded { granted, frame: sample.frame() }));
    }

    #[test]
    fn the_start_of_a_frame_is_no_frame(sample in samples()) {
        let bytes = encoded(sample.frame(), 0);
        for end in 0..bytes.len() {
            prop_assert!(Frame::decode(&bytes[..end]).is_err());
        }
    }

    #[test]
    fn a_damaged_frame_is_another_frame_or_an_error(sample in samples(), by in 1..=255_u8) {
        let mut bytes = encoded(sample.frame(), 9);
        for at in 0..bytes.len() {
            bytes[at] ^= by;
            is_a_frame_or_an_error(&bytes);
            bytes[at] ^= by;
        }
    }

    #[test]
    fn any_body_is_a_frame_or_an_error(kind in 0..13_u8, body in prop::collection::vec(any::<u8>(), 0..2100)) {
        let mut bytes = [&MAGIC[..], &[VERSIONS.newest as u8, kind, 0, 0, 0], &[0; 4], &(body.len() as u32).to_le_bytes()].concat();
        bytes.extend(&body);
        is_a_frame_or_an_error(&bytes);
    }
}

#[test]
fn errors_name_the_fault_of_a_header() {
    let good = encoded(Frame::Bell { slot: 1 }, 0);
    let cases = [
        (0, b'P', FrameError::Magic),
        (3, 0, FrameError::Version(0)),
        (3, 2, FrameError::Version(2)),
        (4, 0, FrameError::Kind(0)),
        (4, 13, FrameError::Kind(13)),
        (5, 1, FrameError::Reserved),
        (12, 3, FrameError::Length { received: 20, promised: 3 }),
        (15, 0xff, FrameError::Length { received: 20, promised: 0xff00_0004 }),
        (4, 9, FrameError::Body { kind: "dead", length: 4 }),
        (4, 1, FrameError::Body { kind: "credit", length: 4 }),
        (4, 5, FrameError::Body { kind: "request", length: 4 }),
    ];
    for (at, value, expected) in cases {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert_eq!(Frame::decode(&bytes), Err(expected));
    }
    assert_eq!(Frame::decode(b"\xd5tf"), Err(FrameError::Short(3)));
    let mut long =
        encoded(Frame::Status { request_id: RequestId(1), code: 2, text: "x".repeat(MAX_TEXT).into() }, 0);
    long.push(b'x');
    long[12..16].copy_from_slice(&(2033_u32).to_le_bytes());
    assert_eq!(Frame::decode(&long), Err(FrameError::Length { received: 2049, promised: 2033 }));
}

#[test]
fn a_fault_in_a_request_names_the_request() {
    let (request_id, good) = (RequestId(7), encoded(request("loss", Some(sink())), 0));
    let cases = [
        (32, 4, RequestFault::Flags(4)),
        (53, 9, RequestFault::Metadata(MetadataError::Version(9))),
        (55, 200, RequestFault::Metadata(MetadataError::Rank(200))),
        (good.len() - 1, 0xff, RequestFault::Name),
    ];
    for (at, value, fault) in cases {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert_eq!(Frame::decode(&bytes), Err(FrameError::Request { request_id, fault }));
    }
    let mut short = good[..40].to_vec();
    short[12..16].copy_from_slice(&24_u32.to_le_bytes());
    let fault = RequestFault::Short(24);
    assert_eq!(Frame::decode(&short), Err(FrameError::Request { request_id, fault }));
}

#[test]
fn encoding_refuses_a_long_name_and_decoding_leaves_it_to_the_provider() {
    let mut buffer = [0; MAX_FRAME];
    for length in [0, MAX_NAME + 1, 10 << 20] {
        let name = "n".repeat(length);
        assert_eq!(request(&name, None).encode(0, &mut buffer), Err(FrameError::Name(length)));
    }
    let message = FrameError::Name(MAX_NAME + 1).to_string();
    assert!(message.contains("1025") && message.contains("1024"), "{message}");

    let mut bytes = encoded(request(&"n".repeat(MAX_NAME), None), 0);
    bytes.push(b'n');
    let length = bytes.len() - HEADER;
    bytes[12..16].copy_from_slice(&(length as u32).to_le_bytes());
    let Ok(Decoded { frame: Frame::Request(request), .. }) = Frame::decode(&bytes) else {
        panic!("no request");
    };
    assert_eq!(request.name.len(), MAX_NAME + 1);
}

#[test]
fn a_status_is_an_error_and_its_text_is_cut_between_characters() {
    let mut buffer = [0; MAX_FRAME];
    for code in [0, 17] {
        let status = Frame::Status { request_id: RequestId(1), code, text: "".into() };
        assert_eq!(status.encode(0, &mut buffer), Err(FrameError::Code(code)));
    }
    let text = format!("x{}", "ä".repeat(MAX_TEXT));
    let bytes = encoded(Frame::Status { request_id: RequestId(1), code: 5, text: (&*text).into() }, 0);
    let Ok(Decoded { frame: Frame::Status { text: seen, .. }, .. }) = Frame::decode(&bytes) else {
        panic!("{bytes:?}");
    };
    assert!(text.starts_with(&*seen));
    assert_eq!(seen.len(), MAX_TEXT - 1);
    let at = HEADER + 8;
    let mut other = bytes.clone();
    other[at] = 77;
    assert_eq!(Frame::decode(&other), Err(FrameError::Code(77)));
    other[at] = 5;
    other[at + 4] = 0xff;
    assert_eq!(Frame::decode(&other), Err(FrameError::Text));
}
