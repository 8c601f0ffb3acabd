//! Gets, puts and exchanges: the content, and where it lies.

use arrow_array::RecordBatch;
use arrow_flight::Ticket;
use support::Runtime;
use tokio_stream::StreamExt as _;
use tonic_rdma::RdmaChannel;
use tonic_rdma_flight::{ALIGNMENT, BatchStream, FlightClient, Placement};

use crate::batches::{of_all_kinds, of_numbers, without_columns};
use crate::service::{Store, beside, encoded, start};

/// Reads a stream to its end.
pub(crate) async fn collect(mut stream: BatchStream) -> (Vec<RecordBatch>, Placement) {
    let mut batches = Vec::new();
    while let Some(batch) = stream.next().await {
        batches.push(batch.unwrap());
    }
    (batches, stream.placement())
}

/// Compares batches, and names the first column that differs.
pub(crate) fn same(found: &[RecordBatch], expected: &[RecordBatch]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.schema(), expected.schema());
        assert_eq!(found.num_rows(), expected.num_rows());
        for (column, field) in expected.schema().fields().iter().enumerate() {
            let (found, expected) = (found.column(column), expected.column(column));
            assert!(found == expected, "batch {index}, column {field}:\n{found:?}\n{expected:?}");
        }
    }
}

/// Gets, puts and exchanges `batches`. Returns the placements of the three.
async fn there_and_back(
    store: &Store,
    client: &mut FlightClient<RdmaChannel>,
    batches: &[RecordBatch],
) -> [Placement; 3] {
    store.insert("here", batches);
    let (got, get) = collect(client.do_get(Ticket::new("here")).await.unwrap()).await;
    same(&got, batches);

    let mut replies = client.do_put(encoded("there", batches.to_vec())).await.unwrap();
    assert_eq!(replies.next().await.unwrap().unwrap().app_metadata, "stored");
    assert!(replies.next().await.is_none());
    let put = store.stored("there").unwrap();
    same(&put.batches, batches);

    let exchanged = client.do_exchange(encoded("back", batches.to_vec())).await.unwrap();
    let (exchanged, exchange) = collect(exchanged).await;
    same(&exchanged, batches);
    [get, put.placement, exchange]
}

fn everywhere(test: impl AsyncFn(Store, FlightClient<RdmaChannel>, RdmaChannel)) {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (store, client, channel) = start().await;
            test(store, client, channel).await;
        });
    }
}

#[test]
fn batches_of_all_kinds_arrive_as_they_were() {
    everywhere(async |store, mut client, _| {
        let batches: Vec<_> = [1000, 3, 0, 20_000].map(|rows| of_all_kinds(rows, rows)).into();
        for placement in there_and_back(&store, &mut client, &batches).await {
            assert_eq!(placement.batches, 4);
        }
        // Slices begin within the buffers of the whole.
        let slices: Vec<_> =
            [(0, 7), (501, 400), (999, 1)].map(|(at, rows)| batches[0].slice(at, rows)).into();
        there_and_back(&store, &mut client, &slices).await;
        there_and_back(&store, &mut client, &[without_columns(5), without_columns(0)]).await;
    });
}

#[test]
fn large_batches_are_aligned_and_not_copied() {
    everywhere(async |store, mut client, channel| {
        let batches: Vec<_> =
            [8 << 20, 8 << 10, 1 << 20, 100_000].map(|bytes| of_numbers(bytes, bytes as u64)).into();
        for placement in there_and_back(&store, &mut client, &batches).await {
            let batches = batches.len() as u64;
            // Two columns, of which one has nulls.
            let buffers = 3 * batches;
            let expected = Placement { batches, bodies: batches, aligned: batches, buffers, ..placement };
            assert_eq!(placement, expected);
            assert_eq!((placement.in_place, placement.realigned_bytes), (buffers, 0));
        }
        let connection = channel.last_connection().unwrap();
        assert!(connection.is_native(), "{}", connection.reason());
    });
}

/// Metadata of the application may be longer than the body.
#[test]
fn bodies_are_aligned_beside_metadata_of_any_length() {
    everywhere(async |store, mut client, _| {
        let batches: Vec<_> = [4096, 16 << 10, 300_000].map(|bytes| of_numbers(bytes, bytes as u64)).into();
        store.insert("here", &batches);
        for bytes in [0, 10, 1000, 4096, 40_000, 400_000] {
            let ticket = Ticket::new(format!("here@{bytes}"));
            let (got, get) = collect(client.do_get(ticket).await.unwrap()).await;
            same(&got, &batches);
            let messages = beside(bytes, encoded("there", batches.clone()));
            let mut replies = client.do_put(messages).await.unwrap();
            while let Some(reply) = replies.next().await {
                reply.unwrap();
            }
            let put = store.stored("there").unwrap();
            same(&put.batches, &batches);
            for placement in [get, put.placement] {
                let counts = (placement.bodies, placement.aligned, placement.realigned_bytes);
                assert_eq!(counts, (3, 3, 0), "{bytes} bytes of metadata");
            }
        }
    });
}

/// Most programs collect a stream before they work with it, and none sets anything for that.
#[test]
fn all_batches_of_a_long_stream_can_be_kept() {
    Runtime::MultiThread.run(async {
        let (store, mut client, _) = start().await;
        let batches: Vec<_> = (0..200).map(|seed| of_numbers(1 << 20, seed)).collect();
        for placement in there_and_back(&store, &mut client, &batches).await {
            let counts = (placement.batches, placement.aligned, placement.realigned_bytes);
            assert_eq!(counts, (200, 200, 0));
        }
    });
}

#[test]
fn arrays_outlive_the_call_and_keep_their_alignment() {
    Runtime::MultiThread.run(async {
        let (store, mut client, _) = start().await;
        let batches: Vec<_> = (0..40).map(|seed| of_numbers(256 << 10, seed)).collect();
        store.insert("many", &batches);
        let (kept, placement) = collect(client.do_get(Ticket::new("many")).await.unwrap()).await;
        assert_eq!((placement.aligned, placement.in_place), (40, 120));
        drop((client, store));
        for (kept, batch) in kept.iter().zip(&batches) {
            assert_eq!(kept, batch);
            for column in kept.columns() {
                let data = arrow_array::Array::to_data(column);
                assert!(data.buffers()[0].as_ptr().addr().is_multiple_of(ALIGNMENT));
            }
        }
    });
}

#[test]
fn many_streams_at_a_time_keep_their_contents() {
    everywhere(async |store, client, _| {
        let tasks: tokio::task::JoinSet<()> = (0..8u64)
            .map(|task| {
                let (mut client, store) = (client.clone(), store.clone());
                async move {
                    let name = format!("stream {task}");
                    let batches: Vec<_> = (0..6).map(|seed| of_numbers(300_000, seed * 8 + task)).collect();
                    let mut replies = client.do_put(encoded(&name, batches.clone())).await.unwrap();
                    while let Some(reply) = replies.next().await {
                        reply.unwrap();
                    }
                    let (got, _) = collect(client.do_get(Ticket::new(name.clone())).await.unwrap()).await;
                    same(&got, &batches);
                    same(&store.stored(&name).unwrap().batches, &batches);
                }
            })
            .collect();
        tasks.join_all().await;
    });
}

#[test]
fn calls_without_batches_use_the_control_client() {
    everywhere(async |_, client, _| {
        let mut actions = client.control().list_actions(arrow_flight::Empty {}).await.unwrap().into_inner();
        assert_eq!(actions.next().await.unwrap().unwrap().r#type, "nothing");
        let refused = client.control().get_schema(arrow_flight::FlightDescriptor::default()).await;
        assert_eq!(refused.unwrap_err().code(), tonic::Code::Unimplemented);
    });
}
