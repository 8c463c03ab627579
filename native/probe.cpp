// Prints the best instruction set of this machine. CMakeLists.txt runs it to choose what to compile.
#include <cstdio>

#include "detect.cpp"  // one file: try_run of older versions of CMake takes no more

int main() { return std::puts(regard::best_isa()) < 0; }
