//! Peers of which one takes landed messages, other codecs, and compressed calls.

use bytes::Bytes;
use tonic::Code;
use tonic_prost::ProstCodec;
use tonic_rdma::CallConfig;
use tonic_rdma::gather::{self, GatherCodec};
use tonic_rdma::memory::Pool;

use crate::gather_support::{Depot, Parcel, Receipt, both, call_with, connect, get, put, serve};

const LIMIT: usize = 64 << 20;
const SIZES: [usize; 5] = [100, 5000, 100_000, (1 << 20) + 3, (9 << 20) + 1];

#[tokio::test]
async fn one_end_alone_may_take_landed_messages() {
    let pool = Pool::for_sending(256 << 20);
    for landed in [None, Some(LIMIT)] {
        let address = serve(&Depot::new(LIMIT), landed, CallConfig::default()).await;
        let channel = connect(address, CallConfig::default()).await;
        for (&length, seed) in SIZES.iter().zip(1..) {
            for memory in [None, Some(&pool)] {
                let parcel = || Parcel::new(seed, length, &[], memory);
                let length = length as u64;
                assert_eq!(put(both(&channel, LIMIT), parcel()).await.unwrap().length, length);
                assert_eq!(
                    put(gather::GatherRequests::new(channel.clone()), parcel()).await.unwrap().length,
                    length
                );
                assert_eq!(put(channel.clone(), parcel()).await.unwrap().length, length);
            }
            get(both(&channel, LIMIT), seed, length).await.unwrap().check();
            get(channel.clone(), seed, length).await.unwrap().check();
        }
    }
}

/// The stock codec as sender: its messages land, too, and are copied only where tonic's own encoder copies.
#[tokio::test]
async fn messages_of_the_stock_codec_reach_ours() {
    let address = serve(&Depot::new(LIMIT), Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default()).await;
    for (&length, seed) in SIZES.iter().zip(1..) {
        let codec = ProstCodec::<Parcel, Receipt>::default();
        let parcel = Parcel::new(seed, length, &[], None);
        let receipt = call_with(channel.clone(), "Put", parcel, codec, false).await.unwrap().into_inner();
        assert_eq!(receipt.length, length as u64);
    }
}

/// A codec that does not know landed messages fails, and says so: it never takes one for another message.
#[tokio::test]
async fn another_codec_fails_where_messages_land() {
    let address = serve(&Depot::new(LIMIT), Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default()).await;
    let pool = Pool::for_sending(LIMIT as u64);
    let wish = Receipt { seed: 4, length: 100_000, ..Receipt::default() };
    let codec = ProstCodec::<Receipt, Parcel>::default();
    let status = call_with(both(&channel, LIMIT), "Get", wish.clone(), codec, false).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    // In the server.
    let codec = GatherCodec::<Parcel, Receipt>::default();
    let parcel = Parcel::new(4, 100_000, &[], Some(&pool));
    let status = call_with(both(&channel, LIMIT), "Stock", parcel, codec, false).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    // Without the wish, and for messages that do not land, it works.
    let codec = ProstCodec::<Receipt, Parcel>::default();
    call_with(channel.clone(), "Get", wish, codec, false).await.unwrap().into_inner().check();
    let codec = GatherCodec::<Parcel, Receipt>::default();
    let small = Parcel::new(4, 100, &[], None);
    assert!(call_with(both(&channel, LIMIT), "Stock", small, codec, false).await.is_ok());
    assert_eq!(pool.statistics().leased_send, 0, "all was given back");
}

/// A peer that sends the bytes of a stub gets an error: it gets no other message.
#[tokio::test]
async fn a_forged_stub_is_refused() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct Forged {
        #[prost(bytes = "bytes", tag = "1")]
        bytes: Bytes,
    }
    // A codec whose messages are what the field has.
    #[derive(Clone, Default)]
    struct Raw;
    impl tonic::codec::Encoder for Raw {
        type Item = Forged;
        type Error = tonic::Status;
        fn encode(
            &mut self,
            item: Forged,
            buffer: &mut tonic::codec::EncodeBuf<'_>,
        ) -> Result<(), tonic::Status> {
            bytes::BufMut::put(buffer, item.bytes);
            Ok(())
        }
    }
    impl tonic::codec::Codec for Raw {
        type Encode = Forged;
        type Decode = Receipt;
        type Encoder = Self;
        type Decoder = <GatherCodec<Forged, Receipt> as tonic::codec::Codec>::Decoder;
        fn encoder(&mut self) -> Self {
            Self
        }
        fn decoder(&mut self) -> Self::Decoder {
            GatherCodec::<Forged, Receipt>::default().decoder()
        }
    }
    let address = serve(&Depot::new(LIMIT), Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default()).await;
    put(both(&channel, LIMIT), Parcel::new(1, 100_000, &[], None)).await.unwrap();
    for token in [0_u64, 1, u64::MAX] {
        let mut stub = b"\x07landed\x07".to_vec();
        stub.extend_from_slice(&token.to_be_bytes());
        let forged = Forged { bytes: stub.into() };
        let status = call_with(channel.clone(), "Put", forged, Raw, false).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal, "{status}");
        assert!(status.message().contains("landed message"), "{status}");
    }
}

#[tokio::test]
async fn compressed_calls_are_decoded_by_tonic() {
    let address = serve(&Depot::new(LIMIT), Some(LIMIT), CallConfig::default()).await;
    let channel = connect(address, CallConfig::default()).await;
    for (&length, seed) in SIZES.iter().zip(1..) {
        let codec = GatherCodec::<Parcel, Receipt>::default();
        let parcel = Parcel::new(seed, length, &[], None);
        let receipt = call_with(both(&channel, LIMIT), "Put", parcel, codec, true).await.unwrap();
        assert_eq!(receipt.into_inner().length, length as u64);
    }
}
