//! The codec that leaves large fields uncopied when somebody takes them.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic_prost::ProstDecoder;

use super::{THRESHOLD, pieces};
use crate::memory::GatherBuf;

/// Protocol buffers as with [`ProstCodec`](tonic_prost::ProstCodec); see the [module](super) for what it adds.
#[derive(Clone, Debug)]
pub struct GatherCodec<T, U> {
    messages: PhantomData<fn(T) -> U>,
}

impl<T, U> Default for GatherCodec<T, U> {
    fn default() -> Self {
        Self { messages: PhantomData }
    }
}

impl<T, U> Codec for GatherCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = GatherEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        GatherEncoder { messages: PhantomData }
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::default()
    }
}

/// The [`Encoder`] of [`GatherCodec`].
#[derive(Clone, Debug)]
pub struct GatherEncoder<T> {
    messages: PhantomData<fn(T)>,
}

impl<T: Message> Encoder for GatherEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let failed = |error| Status::internal(format!("a message that can't be encoded: {error}"));
        if !pieces::is_collecting() {
            return item.encode(buffer).map_err(failed);
        }
        let mut gather = GatherBuf::new(buffer, THRESHOLD);
        item.encode(&mut gather).map_err(failed)?;
        let (copied, pieces) = gather.finish();
        pieces::add(copied, pieces);
        Ok(())
    }
}
