// What relay.cpp and machine.cpp say to each other, over a socket that keeps messages whole.
//
//     relay      CALL     run this function with these arguments
//     machine    FETCH    the pages from this address on, as many as there are, at most COUNT: they come as one
//     message,
//                         of 1 byte where there is none
//                STORE    these bytes were written
//                DONE     the function has returned
#pragma once

#include <cstdint>

#include "../../native/abi.h"

constexpr int64_t PAGE = 4096, COUNT = 16;

enum Kind : int64_t { CALL, FETCH, STORE, DONE };
enum Function : int64_t { WORKSPACE, FORWARD, ATTEND, ATTEND_WORKSPACE, BACKWARD, GATHER, LINEAR, PRODUCTS, STREAM };

struct Message {
    Kind kind;
    int64_t which;         // a Function, or an address
    int64_t arguments[4];  // of CALL; bytes of STORE; what DONE returns
    double number;         // seconds of CALL; what DONE returns
    char content[PAGE];    // of STORE; the names of the instruction sets in the first message, apart by blanks
};

constexpr int64_t HEADER = sizeof(Message) - PAGE;
