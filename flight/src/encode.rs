//! Encodes record batches into Flight's messages, with bodies in memory that a device sends without another
//! copy.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_flight::error::FlightError;
use arrow_flight::{FlightData, FlightDescriptor};
use arrow_ipc::writer::{IpcWriteOptions, StreamEncoder};
use arrow_schema::{ArrowError, Schema, SchemaRef};
use bytes::Bytes;
use tokio_stream::Stream;
use tonic_rdma::memory::Pool;

/// Encodes record batches of one schema.
///
/// arrow's writer hands out the buffers of a batch by reference. The encoder copies them once, side by side,
/// into a buffer of the [`Pool`], which is the body of the message. A connection sends this buffer from where
/// it is. arrow-flight's own encoder copies once as well, into memory of the program's allocator, and tonic's
/// codec copies that memory again.
///
/// Dictionaries are sent as messages of their own when they change. One batch is one message, whatever its
/// length: a program that also serves clients with a limit of 4 MiB, tonic's default, cuts its batches by
/// [`RecordBatch::slice`], which copies nothing.
///
/// ```
/// use arrow_array::record_batch;
/// use tonic_rdma::memory::Pool;
/// use tonic_rdma_flight::BatchEncoder;
///
/// let pool = Pool::for_sending(64 << 20);
/// let batch = record_batch!(("id", Int32, [1, 2, 3]), ("name", Utf8, ["a", "b", "c"]))?;
/// let mut encoder = BatchEncoder::new(&batch.schema(), &pool)?;
/// let messages = encoder.encode(&batch)?; // the schema, and the batch
/// assert_eq!(messages.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BatchEncoder {
    schema: SchemaRef,
    /// `None` after the end.
    encoder: Option<StreamEncoder>,
    pool: Pool,
    /// For the first message.
    descriptor: Option<FlightDescriptor>,
    is_begun: bool,
    unpooled: u64,
}

impl BatchEncoder {
    /// Makes an encoder of batches with `schema`. Bodies are buffers of `pool`, which is a
    /// [`Pool::for_sending`].
    ///
    /// # Errors
    /// Arrow's format for messages can't describe the schema.
    pub fn new(schema: &SchemaRef, pool: &Pool) -> Result<Self, FlightError> {
        let encoder = Some(StreamEncoder::try_new(schema)?);
        let (schema, pool) = (SchemaRef::clone(schema), pool.clone());
        Ok(Self { schema, encoder, pool, descriptor: None, is_begun: false, unpooled: 0 })
    }

    /// Sets arrow's options. With an alignment of less than 64 bytes, or with compression, the receiver may
    /// have to copy buffers. To be set before the first batch.
    ///
    /// ```
    /// # use arrow_array::record_batch;
    /// # use tonic_rdma::memory::Pool;
    /// use arrow_ipc::writer::{DictionaryHandling, IpcWriteOptions};
    /// use tonic_rdma_flight::BatchEncoder;
    ///
    /// # let batch = record_batch!(("id", Int32, [1, 2, 3]))?;
    /// let options = IpcWriteOptions::default().with_dictionary_handling(DictionaryHandling::Delta);
    /// let encoder = BatchEncoder::new(&batch.schema(), &Pool::for_sending(64 << 20))?.options(options)?;
    /// # drop(encoder);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Arrow's format for messages can't describe the schema with these options.
    pub fn options(mut self, options: IpcWriteOptions) -> Result<Self, FlightError> {
        self.encoder = Some(StreamEncoder::try_new_with_options(&self.schema, options)?);
        Ok(self)
    }

    /// Sets the descriptor of the first message, by which a put and an exchange name their flight.
    #[must_use]
    pub fn descriptor(mut self, descriptor: FlightDescriptor) -> Self {
        self.descriptor = Some(descriptor);
        self
    }

    /// Encodes `batch`. Returns its messages in the order in which they have to be sent: before the first
    /// batch the schema, then the dictionaries that changed, then the batch.
    ///
    /// # Errors
    /// The batch has another schema, arrow can't encode it, or the stream has ended.
    pub fn encode(&mut self, batch: &RecordBatch) -> Result<Vec<FlightData>, FlightError> {
        if *batch.schema_ref() != self.schema {
            let difference = difference(&self.schema, batch.schema_ref());
            let text = format!("the batch has another schema than its stream: {difference}");
            return Err(ArrowError::SchemaError(text).into());
        }
        let ended = || FlightError::protocol("a batch can't be encoded after the end of its stream");
        let buffers = self.encoder.as_mut().ok_or_else(ended)?.encode(batch)?;
        self.messages(buffers)
    }

    /// Ends the stream. Returns the schema if there was no batch, and nothing otherwise.
    ///
    /// # Errors
    /// arrow can't encode the schema.
    pub fn finish(&mut self) -> Result<Vec<FlightData>, FlightError> {
        let Some(encoder) = self.encoder.take() else { return Ok(Vec::new()) };
        let buffers = encoder.finish()?;
        if self.is_begun { Ok(Vec::new()) } else { self.messages(buffers) }
    }

    /// Encodes the batches of a stream.
    ///
    /// ```
    /// # use arrow_array::record_batch;
    /// # use tonic_rdma::memory::Pool;
    /// # use tonic_rdma_flight::BatchEncoder;
    /// # let batch = record_batch!(("id", Int32, [1, 2, 3]))?;
    /// let encoder = BatchEncoder::new(&batch.schema(), &Pool::for_sending(64 << 20))?;
    /// let messages = encoder.stream(tokio_stream::iter([Ok(batch)])); // for FlightClient::do_put
    /// # drop(messages);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn stream<S>(self, batches: S) -> EncodedBatches
    where
        S: Stream<Item = Result<RecordBatch, FlightError>> + Send + 'static,
    {
        EncodedBatches { encoder: self, batches: Box::pin(batches), queue: VecDeque::new(), is_done: false }
    }

    /// Returns the number of bodies for which the pool had no room. They are in memory of the allocator, and
    /// the connection copies them once more.
    pub fn unpooled(&self) -> u64 {
        self.unpooled
    }

    /// Makes messages of arrow's stream.
    fn messages(&mut self, buffers: Vec<Buffer>) -> Result<Vec<FlightData>, FlightError> {
        let mut stream = MessageReader::new(&buffers);
        let mut messages = Vec::with_capacity(2);
        while let Some(header) = stream.header()? {
            let length = body_length(&header)?;
            let data_body = self.body(&mut stream, length)?;
            let flight_descriptor = self.descriptor.take();
            messages.push(FlightData {
                flight_descriptor,
                data_header: header.into(),
                data_body,
                ..Default::default()
            });
            self.is_begun = true;
        }
        Ok(messages)
    }

    /// Copies the next `length` bytes of the stream into a buffer of the pool.
    fn body(&mut self, stream: &mut MessageReader<'_>, length: usize) -> Result<Bytes, FlightError> {
        if length == 0 {
            return Ok(Bytes::new());
        }
        match self.pool.allocate(length) {
            Ok(mut body) => {
                let mut rest = &mut body[..];
                stream.take(length, |chunk| {
                    let (target, after) = std::mem::take(&mut rest).split_at_mut(chunk.len());
                    target.copy_from_slice(chunk);
                    rest = after;
                })?;
                Ok(body.freeze())
            }
            Err(_) => {
                self.unpooled += 1;
                let mut body = Vec::with_capacity(length);
                stream.take(length, |chunk| body.extend_from_slice(chunk))?;
                Ok(body.into())
            }
        }
    }
}

impl fmt::Debug for BatchEncoder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("BatchEncoder").field("schema", &self.schema).finish_non_exhaustive()
    }
}

/// The messages of a stream of batches, from [`BatchEncoder::stream`]. After an error the stream ends.
pub struct EncodedBatches {
    encoder: BatchEncoder,
    batches: Pin<Box<dyn Stream<Item = Result<RecordBatch, FlightError>> + Send>>,
    queue: VecDeque<FlightData>,
    is_done: bool,
}

impl Stream for EncodedBatches {
    type Item = Result<FlightData, FlightError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(message) = this.queue.pop_front() {
                return Poll::Ready(Some(Ok(message)));
            }
            if this.is_done {
                return Poll::Ready(None);
            }
            let encoded = match std::task::ready!(this.batches.as_mut().poll_next(context)) {
                Some(batch) => batch.and_then(|batch| this.encoder.encode(&batch)),
                None => {
                    this.is_done = true;
                    this.encoder.finish()
                }
            };
            match encoded {
                Ok(messages) => this.queue.extend(messages),
                Err(error) => {
                    this.is_done = true;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}

impl fmt::Debug for EncodedBatches {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("EncodedBatches").field("encoder", &self.encoder).finish_non_exhaustive()
    }
}

/// Describes how `found` differs from `expected`.
fn difference(expected: &Schema, found: &Schema) -> String {
    let (columns, here) = (expected.fields().len(), found.fields().len());
    if columns != here {
        return format!("{here} columns instead of {columns}");
    }
    let mut pairs = expected.fields().iter().zip(found.fields()).enumerate();
    match pairs.find(|(_, (expected, found))| expected != found) {
        Some((index, (expected, found))) => format!("column {index} is {found:?} instead of {expected:?}"),
        None => "the metadata differs".to_owned(),
    }
}

/// Returns the length of the body that follows a header.
fn body_length(header: &[u8]) -> Result<usize, FlightError> {
    let message = arrow_ipc::root_as_message(header)
        .map_err(|error| ArrowError::IpcError(format!("arrow wrote a header that it can't read: {error}")))?;
    let length = message.bodyLength();
    usize::try_from(length)
        .map_err(|_| ArrowError::IpcError(format!("arrow wrote a body of {length} bytes")).into())
}

/// Reads a stream of messages in arrow's format, which lies in several buffers.
struct MessageReader<'a> {
    buffers: std::slice::Iter<'a, Buffer>,
    current: &'a [u8],
}

impl<'a> MessageReader<'a> {
    /// The marker before the length of a header, which Arrow writes since version 0.15.
    const CONTINUATION: [u8; 4] = [0xff; 4];

    fn new(buffers: &'a [Buffer]) -> Self {
        Self { buffers: buffers.iter(), current: &[] }
    }

    /// Returns the header of the next message, or `None` at the end.
    fn header(&mut self) -> Result<Option<Vec<u8>>, FlightError> {
        if self.is_at_end() {
            return Ok(None);
        }
        let mut word = self.word()?;
        if word == Self::CONTINUATION {
            word = self.word()?;
        }
        // A length of zero is the end of the stream.
        let length = u32::from_le_bytes(word) as usize;
        let mut header = Vec::with_capacity(length);
        self.take(length, |chunk| header.extend_from_slice(chunk))?;
        Ok((length > 0).then_some(header))
    }

    fn word(&mut self) -> Result<[u8; 4], FlightError> {
        let mut word = [0; 4];
        let mut at = 0;
        self.take(word.len(), |chunk| {
            word[at..at + chunk.len()].copy_from_slice(chunk);
            at += chunk.len();
        })?;
        Ok(word)
    }

    fn is_at_end(&mut self) -> bool {
        while self.current.is_empty() {
            match self.buffers.next() {
                Some(buffer) => self.current = buffer.as_slice(),
                None => return true,
            }
        }
        false
    }

    /// Passes the next `length` bytes to `with`, in chunks.
    fn take(&mut self, mut length: usize, mut with: impl FnMut(&'a [u8])) -> Result<(), FlightError> {
        while length > 0 {
            if self.is_at_end() {
                return Err(ArrowError::IpcError(format!("arrow wrote {length} bytes too few")).into());
            }
            let (chunk, rest) = self.current.split_at(length.min(self.current.len()));
            with(chunk);
            (self.current, length) = (rest, length - chunk.len());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use arrow_array::record_batch;

    use super::*;

    #[test]
    fn bodies_lie_in_the_pool_while_it_has_room() {
        let batch = record_batch!(("id", Int64, [1, 2, 3])).unwrap();
        let pool = Pool::for_sending(1 << 20);
        let mut encoder = BatchEncoder::new(&batch.schema(), &pool).unwrap();
        let messages = encoder.encode(&batch).unwrap();
        let body = &messages[1].data_body;
        assert!(pool.find(body.as_ptr() as usize, body.len()).is_some());
        assert!(body.as_ptr().addr().is_multiple_of(64), "arrow's own decoder can read it in place as well");
        assert_eq!(encoder.unpooled(), 0);

        let full = Pool::for_sending(0);
        let mut encoder = BatchEncoder::new(&batch.schema(), &full).unwrap();
        let others = encoder.encode(&batch).unwrap();
        assert_eq!(others, messages);
        assert_eq!(encoder.unpooled(), 1);
    }

    #[test]
    fn the_schema_comes_once_and_without_batches_as_well() {
        let batch = record_batch!(("id", Int64, [1, 2, 3])).unwrap();
        let pool = Pool::for_sending(1 << 20);
        let descriptor = FlightDescriptor::new_cmd("x");
        let encoder = || BatchEncoder::new(&batch.schema(), &pool).unwrap().descriptor(descriptor.clone());
        let mut with = encoder();
        assert_eq!(with.encode(&batch).unwrap().len(), 2);
        let second = with.encode(&batch).unwrap();
        assert_eq!((second.len(), &second[0].flight_descriptor), (1, &None));
        assert!(with.finish().unwrap().is_empty());
        assert!(with.encode(&batch).is_err());
        let mut without = encoder();
        let messages = without.finish().unwrap();
        assert_eq!((messages.len(), messages[0].flight_descriptor.as_ref()), (1, Some(&descriptor)));
    }

    #[test]
    fn another_schema_is_an_error_that_names_the_difference() {
        let batch = record_batch!(("id", Int64, [1])).unwrap();
        let other = record_batch!(("other", Utf8, ["1"])).unwrap();
        let mut encoder = BatchEncoder::new(&batch.schema(), &Pool::for_sending(1 << 20)).unwrap();
        let text = encoder.encode(&other).unwrap_err().to_string();
        assert!(text.contains("\"other\"") && text.contains("\"id\""), "{text}");
    }
}
