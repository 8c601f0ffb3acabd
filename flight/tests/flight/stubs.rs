//! What a Flight service of the tests, the bench and the example has besides its own calls.

/// The streams of a `FlightService`, all of them boxed, and calls that fail with `UNIMPLEMENTED`. Goes into the
/// implementation of the trait.
macro_rules! flight_stubs {
    ($($call:ident: $request:ty => $response:ty,)+) => {
        type HandshakeStream = tonic::codegen::BoxStream<arrow_flight::HandshakeResponse>;
        type ListFlightsStream = tonic::codegen::BoxStream<arrow_flight::FlightInfo>;
        type DoGetStream = tonic::codegen::BoxStream<arrow_flight::FlightData>;
        type DoPutStream = tonic::codegen::BoxStream<arrow_flight::PutResult>;
        type DoExchangeStream = tonic::codegen::BoxStream<arrow_flight::FlightData>;
        type DoActionStream = tonic::codegen::BoxStream<arrow_flight::Result>;
        type ListActionsStream = tonic::codegen::BoxStream<arrow_flight::ActionType>;

        // `async_trait` does not see into a macro, so these are as it writes them.
        $(
            fn $call<'service, 'call>(
                &'service self,
                _: tonic::Request<$request>,
            ) -> tonic::codegen::BoxFuture<tonic::Response<$response>, tonic::Status>
            where
                'service: 'call,
                Self: 'call,
            {
                Box::pin(async { Err(tonic::Status::unimplemented(stringify!($call))) })
            }
        )+
    };
}

pub(crate) use flight_stubs;
