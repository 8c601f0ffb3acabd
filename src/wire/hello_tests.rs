use proptest::prelude::*;

use super::*;

fn offers() -> impl Strategy<Value = DeviceOffer> {
    ("[a-z]{0,64}", "[a-z0-9_]{0,64}", prop::collection::vec(any::<u8>(), 0..=MAX_ADDRESS), any::<[u32; 2]>())
        .prop_map(|(provider, device, queue_pair, [receive_slots, slot_size])| DeviceOffer {
            provider,
            device,
            queue_pair,
            receive_slots,
            slot_size,
        })
}

fn messages() -> impl Strategy<Value = Message> {
    let client = (
        any::<[u8; 16]>(),
        any::<u64>(),
        any::<[u32; 3]>(),
        3..=4_u8,
        prop::collection::vec(offers(), 0..=MAX_OFFERS),
    )
        .prop_map(|(boot_id, network_namespace, [uid, pid, capabilities], newest, offers)| {
            let identity = HostIdentity { boot_id, network_namespace, uid, pid };
            let capabilities = capabilities & CAPABILITIES;
            Message::ClientHello(ClientHello { identity, newest, capabilities, offers })
        });
    let accept =
        (any::<u8>(), any::<u32>(), 3_u8.., offers()).prop_map(|(offer, capabilities, version, end)| {
            Answer::Accept {
                offer,
                version,
                queue_pair: end.queue_pair,
                receive_slots: end.receive_slots,
                slot_size: end.slot_size,
                capabilities: capabilities & CAPABILITIES,
            }
        });
    let decline = "[ -~]{0,256}".prop_map(|reason| Answer::Decline { reason });
    let server = prop_oneof![accept, decline].prop_map(Message::ServerHello);
    let connected = any::<Option<u64>>().prop_map(|nonce| Confirm::Connected { nonce });
    let failed = "[ -~]{0,256}".prop_map(|reason| Confirm::Failed { reason });
    prop_oneof![client, server, prop_oneof![connected, failed].prop_map(Message::Confirm)]
}

proptest! {
    #[test]
    fn a_message_is_decoded_once_all_of_its_bytes_are_there(message in messages(), rest in prop::collection::vec(any::<u8>(), 0..20)) {
        let bytes = message.encode().unwrap();
        prop_assert!(bytes.len() <= HEADER + MAX_BODY);
        for end in 0..bytes.len() {
            prop_assert_eq!(Message::decode(&bytes[..end]), Ok(None), "{} of {} bytes", end, bytes.len());
        }
        let length = bytes.len();
        let followed = [bytes, rest].concat();
        prop_assert_eq!(Message::decode(&followed), Ok(Some((message, length))));
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(
        kind in 0..5_u16,
        body in prop::collection::vec(any::<u8>(), 0..600),
        flipped in any::<prop::sample::Index>(),
        message in messages(),
    ) {
        let mut framed = MAGIC.to_vec();
        framed.put_u16_le(LAYOUT);
        framed.put_u16_le(kind);
        framed.put_u32_le(body.len() as u32);
        framed.put_slice(&body);
        let mut damaged = message.encode().unwrap();
        let at = flipped.index(damaged.len());
        damaged[at] ^= 0x41;
        for bytes in [&body, &framed, &damaged] {
            if let Ok(Some((message, length))) = Message::decode(bytes) {
                let again = message.encode().unwrap();
                let newer = matches!(&message, Message::ClientHello(hello) if hello.newest > 4);
                let read = if newer { again.len() } else { length };
                prop_assert_eq!(&again[HEADER..], &bytes[HEADER..read]);
            }
        }
    }
}

#[test]
fn faults_are_named() {
    assert_eq!(Message::decode(b"PRI * HTTP/2.0"), Err(HelloError::Magic));
    let header = |version: u16, kind: u16, length: u32| {
        [&MAGIC[..], &version.to_le_bytes(), &kind.to_le_bytes(), &length.to_le_bytes()].concat()
    };
    assert_eq!(Message::decode(&header(9, 1, 0)), Err(HelloError::Version { seen: 9 }));
    assert_eq!(Message::decode(&header(LAYOUT, 9, 0)), Err(HelloError::Type(9)));
    assert_eq!(Message::decode(&header(LAYOUT, 1, 5000)), Err(HelloError::TooLong(5000)));
    assert_eq!(Message::decode(&header(LAYOUT, 1, 0)), Err(HelloError::Malformed { field: "boot id" }));
    for version in [0, 2, LAYOUT + 1] {
        let error = Message::decode(&header(version, 1, 0)).unwrap_err();
        assert_eq!(error.to_string(), format!("a hello of layout {version}, this end reads layout 3"));
    }
    let trailing = [header(LAYOUT, 3, 2), vec![1, 1]].concat();
    assert_eq!(Message::decode(&trailing), Err(HelloError::Malformed { field: "end of the message" }));
}

#[test]
fn a_long_reason_is_cut_between_characters() {
    let confirm = Message::Confirm(Confirm::Failed { reason: "ä".repeat(300) });
    let bytes = confirm.encode().unwrap();
    let Ok(Some((Message::Confirm(Confirm::Failed { reason }), _))) = Message::decode(&bytes) else {
        panic!("{bytes:?}");
    };
    assert_eq!(reason, "ä".repeat(128));
}

/// Returns a client hello whose newest version is encoded as `newest`, with `more` bytes at its end.
fn hello_of(newest: u8, more: usize) -> Vec<u8> {
    let identity = HostIdentity { boot_id: [1; 16], network_namespace: 2, uid: 3, pid: 4 };
    let hello = ClientHello { identity, newest: 3, capabilities: NATIVE_CALLS, offers: Vec::new() };
    let mut bytes = Message::ClientHello(hello).encode().unwrap();
    assert_eq!(bytes[48..52], NATIVE_CALLS.to_le_bytes(), "as version 3 has it");
    bytes[51] = newest;
    bytes.resize(bytes.len() + more, 9);
    let length = (bytes.len() - HEADER) as u32;
    bytes[12..HEADER].copy_from_slice(&length.to_le_bytes());
    bytes
}

#[test]
fn a_hello_says_the_newest_version_and_newer_ones_may_append() {
    for (encoded, more, expected) in [
        (0, 0, Ok(3)),
        (4, 0, Ok(4)),
        (5, 0, Ok(5)),
        (255, 700, Ok(255)),
        (0, 1, Err("end of the message")),
        (4, 1, Err("end of the message")),
        (1, 0, Err("version")),
        (3, 0, Err("version")),
    ] {
        let bytes = hello_of(encoded, more);
        let newest = match Message::decode(&bytes) {
            Ok(Some((Message::ClientHello(hello), length))) => {
                assert_eq!((hello.capabilities, length), (NATIVE_CALLS, bytes.len()));
                Ok(hello.newest)
            }
            Err(HelloError::Malformed { field }) => Err(field),
            other => panic!("{other:?}"),
        };
        assert_eq!(newest, expected, "{encoded}, {more} more");
    }
}
